import re
from pathlib import Path

import pytest
import yaml

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge.experiment_file import (
    EXTENDED_FILE,
    classes_section,
    experiment_of_text,
    quick,
    read_experiment,
)
from benchmark_control_plane.judge.experiment_matrix import read_cells
from benchmark_control_plane.judge.system_schema import QueueLimits

FOLDER = Path(__file__).parents[3] / "configs" / "bench"
CONFIGS = sorted(path for path in FOLDER.glob("*.yaml") if "systems:" in path.read_text(encoding="utf-8"))
SMALL = {
    "name": "small",
    "question": "Does it run?",
    "classes": {"chat": {"priority": 1, "ttft_ms": 500}},
    "streams": {
        "chat": {
            "kind": "generate",
            "service_class": "chat",
            "share": 1,
            "prompt_tokens": {"fixed": 10},
            "output_tokens": {"fixed": 5},
        }
    },
    "systems": [{"name": "tandem", "kind": "tandem", "simulated": {}}],
}


def changed(path, value):
    """SMALL with `value` at a dotted path; None removes the key."""
    content = yaml.safe_load(yaml.safe_dump(SMALL))
    *parents, last = path.split(".")
    here = content
    for step in parents:
        here = here[int(step)] if isinstance(here, list) else here[step]
    if value is None:
        del here[last]
    else:
        here[last] = value
    return content


RETRIEVAL = {
    "kind": "retrieval", "service_class": "chat", "share": 1, "embed_class": "chat",
    "trace": {"name": "ragpulse"},
}  # fmt: skip


def read(tmp_path, content):
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return read_experiment(path, tmp_path).plan


def test_example_of_the_documentation_is_valid(tmp_path):
    blocks = re.findall(r"```yaml\n(.*?)```", Path("docs/benchmarking.md").read_text("utf-8"), re.DOTALL)
    example, matrix = map(yaml.safe_load, blocks)
    assert read(tmp_path, example).name == "mine"
    path = tmp_path / "matrix.yaml"
    path.write_text(yaml.safe_dump(example | matrix, sort_keys=False), encoding="utf-8")
    assert list(read_cells(path, tmp_path)) == ["mix 5:5", "mix 1:9", "outputs short"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_experiments_are_valid(path):
    plan = next(iter(read_cells(path, Path()).values())).plan
    assert plan.name.partition(":")[0] == path.stem
    assert len(quick(plan).systems) == 2 and quick(plan).seeds == plan.seeds[:1]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("question", None, "question: missing"),
        ("window", {"warmup": 1}, "window.warmup: unknown key; did you mean 'warmup_s'"),
        ("streams.chat.share", 0, "share=0: should be greater than 0"),
        ("streams.chat.service_class", "other", "class 'other' is not in classes"),
        ("streams.chat.prompt_tokens", {}, "exactly one of fixed"),
        ("streams.chat.prompt_tokens", None, "prompt_tokens: missing; kind: generate needs it, or a trace"),
        ("streams.chat.trace", {"name": "azure"}, "no such trace; known are azure-code"),
        ("streams.chat.trace", {"file": "a.csv"}, "columns go with file"),
        ("streams.chat.arrivals",
         {"bursts": {"on_s": 1, "off_s": 1}, "wave": {"period_s": 1, "amplitude": 1}}, "bursts or wave"),
        ("streams.chat.trace", {"name": "azure-code"}, "prompt_tokens: the trace states it; drop one"),
        ("streams.chat.batch", {"fixed": 4}, "batch: kind: generate takes none; drop it"),
        ("streams.chat.embed_class", "chat", "embed_class: kind: generate takes none; drop it"),
        ("streams.chat", {"kind": "retrieval", "service_class": "chat", "share": 1},
         "embed_class: missing; kind: retrieval needs it"),
        ("streams.chat", {"kind": "retrieval", "service_class": "chat", "share": 1, "embed_class": "chat",
                          "trace": {"name": "azure-code"}},
         "query_tokens: missing; kind: retrieval needs it, or a trace that has it"),
        ("streams.chat", RETRIEVAL | {"passages": {"fixed": 3}}, "passages and passage_tokens go together"),
        ("systems.0.deadlines", {"state": "budgets"}, "shares go with budgets and carried"),
        ("systems.0.deadlines", {"state": "remaining", "shares": {"answer": 1}}, "shares go with budgets"),
        ("systems.0.deadlines", {"state": "carried", "shares": {"query": 0.5, "answer": 0.4}}, "sum to 1"),
        ("systems.0.deadlines", {"state": "carried", "shares": {"query": 1.2, "answer": -0.2}}, "above 0"),
        ("systems.0.deadlines", {"state": "remaining", "part": 1}, "deadlines.part: unknown key"),
        ("systems.0.deadlines", {"state": "all"}, "systems.0.deadlines.state"),
        ("systems.0.deadlines", {"state": "remaining"}, "no stream has a deadline_ms"),
        ("classes.chat.times_unloaded", {"ttft": 3}, "state one objective twice"),
        ("classes.overall", {"e2e_ms": 5}, "classes.overall: all requests together have this name"),
        ("systems", [], "systems"),
        ("systems.0.simulated", None, "exactly one of tandem, split"),
        ("systems.0.simulated", {"admission": {"policy": "magic"}}, "admission.policy"),
        ("systems.0.simulated", {"admision": {}}, "did you mean 'admission'"),
        ("systems.0.simulated", {"quota": {"policy": "dynamic"}}, "kv_allocator: static cannot give KV"),
        ("systems.0.simulated", {"admission": {"tpot_guard": False}},
         "system 'tandem': admission.tpot_guard=False does nothing: no class has tpot_ms"),
        ("systems.0.arrivals", {"other": {"cv": 2}}, "'other', which is not in streams"),
        ("systems.0.seeds", [0, 7], "seed 7 is not among the experiment's"),
        ("systems", [{"name": "a", "kind": "baseline", "endpoints": {}}],
         "endpoints.chat: missing; stream 'chat' needs it"),
        ("systems", [{"name": "a", "kind": "baseline",
                      "endpoints": {"chat": {"url": "http://here:port", "model": "m"}}}], "url"),
        ("reference", "nobody", "no such system; choose one of tandem"),
        ("systems", [{"name": "a", "kind": "tandem", "tandem": {}}], "give the models under live"),
        ("systems", [{"name": "a", "kind": "tandem", "ungated": True}] * 2, "'a' is given twice"),
    ],
)  # fmt: skip
def test_mistake_is_reported_in_one_line(tmp_path, path, value, message):
    with pytest.raises(BadInput, match=r"experiment\.yaml") as error:
        read(tmp_path, changed(path, value))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_shares_must_name_the_stages(tmp_path):
    content = changed("streams.chat", RETRIEVAL | {"deadline_ms": 900})
    content["systems"][0]["deadlines"] = {"state": "budgets", "shares": {"query": 0.2, "answer": 0.8}}
    assert read(tmp_path, content).systems[0].deadlines.shares["answer"] == 0.8
    content["streams"]["chat"] |= {"passages": {"fixed": 3}, "passage_tokens": {"fixed": 9}}
    with pytest.raises(BadInput, match="stream 'chat' has the stages query, rerank, answer"):
        read(tmp_path, content)


def test_the_reference_has_no_queue_limit(tmp_path):
    content = changed("systems", [{"name": "pair", "kind": "baseline", "split": {"priorities": True}}])
    content["live"] = {"chat": {"model": "a"}, "embedding": {"model": "b"}}
    assert not read(tmp_path, content).systems[0].is_limited
    content["systems"][0]["split"]["max_concurrent"] = {"embedder": 3}
    with pytest.raises(BadInput, match="reference='pair': max_concurrent keeps it from being saturated"):
        read(tmp_path, content)
    plan = read(tmp_path, content | {"capacity": {"rps": 4}})
    assert plan.systems[0].split.max_concurrent == QueueLimits(embedder=3)
    end = {"url": "http://127.0.0.1:1", "model": "a", "max_concurrent": 2}
    content["systems"] = [{"name": "pair", "kind": "baseline", "endpoints": {"chat": end}}]
    with pytest.raises(BadInput, match="max_concurrent keeps it from being saturated"):
        read(tmp_path, content)


def test_invalid_yaml_is_reported(tmp_path):
    (tmp_path / "experiment.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(BadInput, match="not YAML"):
        read_experiment(tmp_path / "experiment.yaml", tmp_path)
    with pytest.raises(BadInput, match="No such file"):
        read_experiment(tmp_path / "absent.yaml", tmp_path)


def test_extending_file_states_only_differences(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(SMALL), encoding="utf-8")
    path = tmp_path / "other.yaml"
    content = {"extends": "base.yaml", "name": "other", "classes": {"chat": {"ttft_ms": 90}}}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    found = read_experiment(path, tmp_path)
    assert found.plan.name == "other" and found.plan.question == SMALL["question"]
    assert found.plan.classes["chat"].ttft_ms == 90 and found.plan.classes["chat"].priority == 1
    assert "extends: base.yaml" in found.text and "Does it run?" in found.text
    traced = {"kind": "generate", "service_class": "chat", "share": 2, "trace": {"name": "azure-code"}}
    path.write_text(yaml.safe_dump(content | {"streams": {"chat": traced}}), encoding="utf-8")
    assert read_experiment(path, tmp_path).plan.streams["chat"].prompt_tokens is None
    path.write_text(yaml.safe_dump(content | {"streams": {"chat": {"share": 2}}}), encoding="utf-8")
    assert read_experiment(path, tmp_path).plan.streams["chat"].prompt_tokens.fixed == 10
    content |= {"systems": ["tandem", {"name": "ungated", "kind": "baseline", "ungated": True}]}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert [s.simulated for s in read_experiment(path, tmp_path).plan.systems] == [{}, None]
    path.write_text(yaml.safe_dump(content | {"systems": ["tandm"]}), encoding="utf-8")
    with pytest.raises(BadInput, match=r"'tandm' is not in the file this one extends \(tandem\)"):
        read_experiment(path, tmp_path)
    path.write_text("extends: nowhere.yaml", encoding="utf-8")
    with pytest.raises(BadInput, match=r"nowhere\.yaml: No such file"):
        read_experiment(path, tmp_path)


def test_a_file_may_extend_one_that_extends_another(tmp_path):
    contents = {
        "base": SMALL,
        "middle": {"extends": "base.yaml", "name": "middle", "classes": {"chat": {"ttft_ms": 90}}},
        "top": {"extends": "middle.yaml", "name": "top", "systems": ["tandem"]},
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    found = read_experiment(tmp_path / "top.yaml", tmp_path)
    assert found.plan.name == "top" and found.plan.classes["chat"].ttft_ms == 90
    assert found.plan.question == SMALL["question"]
    assert EXTENDED_FILE.findall(found.text) == ["middle.yaml", "base.yaml"]
    assert experiment_of_text(found.text, tmp_path).plan == found.plan
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(SMALL | {"extends": "top.yaml"}), encoding="utf-8")
    with pytest.raises(BadInput, match=r"base\.yaml: extends: top\.yaml extends this file; drop one"):
        read_experiment(tmp_path / "top.yaml", tmp_path)


def test_quick_plan_keeps_tandem_and_a_baseline(tmp_path):
    content = changed("loads", [0.5, 1.0, 2.0]) | {"seeds": [3, 4]}
    content["systems"] += [
        {"name": "other", "kind": "ablation", "simulated": {}},
        {"name": "ungated", "kind": "baseline", "ungated": True},
    ]
    small = quick(read(tmp_path, content))
    assert [system.name for system in small.systems] == ["tandem", "ungated"]
    assert small.loads == (0.5, 2.0) and small.seeds == (3,)


def test_classes_section_holds_the_objectives(tmp_path):
    plan = read(tmp_path, SMALL)
    assert classes_section(plan, {"chat": {"ttft_ms": 80.0}}) == {
        "chat": {"priority": 1, "sheddable": True, "default": True, "ttft_ms": 80.0}
    }
