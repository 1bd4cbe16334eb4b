"""`tandem fleet plan`: demand, capacities, numbers of boxes and what one box keeps."""

import json
from pathlib import Path

import pytest
import yaml

from benchmark_control_plane.capacity.box_kinds import demand_of, part_name
from benchmark_control_plane.capacity.workload_source import busiest_rate
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.request import Kind
from tests.benchmark_control_plane.bench_command import main
from tests.benchmark_control_plane.capacity.test_capacity_command import CHAT, ENCODER, STREAMS, TIMES

QUICK = ["--requests", "60", "--steps", "0"]
CLASSES = {
    "fast": {"ttft_ms": 500, "tpot_ms": 100, "default": True},
    "slow": {"e2e_ms": 5000, "sheddable": False},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Configurations of a box for both, for chat alone and for embeddings alone."""
    for name, content in (("llm", CHAT), ("encoder", ENCODER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content), encoding="utf-8")
    engine = {"max_num_seqs": 16, "max_model_len": 1024}
    chat = {"chat": {"model": str(tmp_path / "llm"), "engine": engine}}
    embeddings = {"embeddings": [{"model": str(tmp_path / "encoder"), "batch_tokens": 4096}]}
    for name, models in (("both", chat | embeddings), ("chat", chat), ("search", embeddings)):
        box = {"models": models, "pool": {"memory": "128MiB"}, "classes": CLASSES}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(box), encoding="utf-8")
    return tmp_path


def fleet(folder: Path, **kinds: dict) -> str:
    stated = {name: {"config": f"{name}.yaml", "gpus": 0, **more} for name, more in kinds.items()}
    (folder / "fleet.yaml").write_text(yaml.safe_dump({"kinds": stated}), encoding="utf-8")
    return str(folder / "fleet.yaml")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    status = main(["fleet", "plan", *arguments, *TIMES, *QUICK, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.long
def test_simulated_boxes_keep_their_parts_of_the_demand(folder, capsys):
    file = fleet(folder, both={}, chat={}, search={})
    status, facts = plan(capsys, file, "--workload", STREAMS, "--rate", "60")
    assert status == 0 and facts["served"] == 1
    assert set(facts["demand"]) == {"fast/llm", "slow/embedding"}
    assert sum(facts["demand"].values()) == pytest.approx(60)
    kinds = {row["name"]: row for row in facts["kinds"]}
    assert "slow/embedding" not in kinds["chat"]["rates"] and "fast/llm" not in kinds["search"]["rates"]
    for part, rate in facts["demand"].items():
        assert sum(row["rates"].get(part, 0.0) for row in kinds.values()) == pytest.approx(rate, rel=1e-3)
    used = [row for row in kinds.values() if row["boxes"]]
    assert all(0 < row["utilisation"] <= 0.8 + 1e-6 for row in used)
    # Capacity is that of the parts that a kind serves, in their proportions.
    assert all(row["capacity"] > 0 for row in kinds.values())
    assert all(share >= 0.9 for row in used for share in row["attainment"].values())
    assert all(row["attainment"] for row in used)


def test_a_stated_capacity_is_taken_and_not_simulated(folder, capsys):
    file = fleet(folder, chat={"capacity": 10}, search={"capacity": 5})
    status, facts = plan(capsys, file, "--workload", STREAMS, "--rate", "40", "--utilisation", "0.5")
    assert status == 0
    kinds = {row["name"]: row for row in facts["kinds"]}
    # Three of four requests are chats.
    assert kinds["chat"]["boxes"] == pytest.approx(facts["demand"]["fast/llm"] / 5, abs=1)
    assert kinds["search"]["boxes"] == pytest.approx(facts["demand"]["slow/embedding"] / 2.5, abs=1)
    assert kinds["chat"]["attainment"] == {}
    assert kinds["chat"]["limit"].startswith("stated; by the model of the device ")


def test_a_demand_beyond_the_most_boxes_gives_status_3(folder, capsys):
    small = {"boxes": 1, "capacity": 10, "autoscale": {"max_boxes": 2}}
    file = fleet(folder, both=small)
    assert main(["fleet", "plan", file, "--workload", STREAMS, "--rate", "40", *TIMES, *QUICK]) == 3
    out = capsys.readouterr().out
    assert "No numbers of boxes serve it: the 2 that the file allows serve 40%." in out
    assert "What holds it down: fast/llm, slow/embedding." in out


@pytest.mark.long
def test_a_kind_that_misses_its_objectives_at_any_rate_serves_nothing(folder, capsys):
    box = yaml.safe_load((folder / "chat.yaml").read_text(encoding="utf-8"))
    box["classes"]["fast"] |= {"tpot_ms": 1, "sheddable": False}
    (folder / "chat.yaml").write_text(yaml.safe_dump(box), encoding="utf-8")
    chat_only = (
        "{chat: {kind: generate, service_class: fast, share: 1, prompt_tokens: {fixed: 200}, "
        "output_tokens: {fixed: 20}}}"
    )
    status, facts = plan(capsys, fleet(folder, chat={}), "--workload", chat_only, "--rate", "5")
    assert status == 3
    assert facts["short"] == ["fast/llm"] and facts["kinds"][0]["capacity"] is None


@pytest.mark.parametrize(
    ("kinds", "arguments", "message"),
    [
        ({"both": {}}, [], "--rate: missing; streams have no rate"),
        (
            {"both": {}},
            ["--rate", "5", "--utilisation", "1.5"],
            "--utilisation=1.5: should be above 0 and at",
        ),
        ({"chat": {}}, ["--rate", "5"], "streams.documents: kind: embed needs models.embeddings; add one"),
        ({"search": {}}, ["--rate", "5"], "streams.chat: kind: generate needs models.chat; add it"),
    ],
)
def test_bad_input_is_one_message(folder, capsys, kinds, arguments, message):
    command = ["fleet", "plan", fleet(folder, **kinds), "--workload", STREAMS, *TIMES, *QUICK, *arguments]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err


def test_a_rate_is_above_zero(folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["fleet", "plan", fleet(folder, both={}), "--workload", STREAMS, "--rate", "0"])
    assert "0: should be a number above 0" in capsys.readouterr().err


def requests(rate: float, warmup: float, measured: float) -> list[PlannedRequest]:
    """A retrieval of query and answer each 1/rate seconds, and a document with each second one."""
    found = []
    for n in range(round(rate * (warmup + measured))):
        at = n / rate - warmup
        query = PlannedRequest(f"{n}-query", at, Kind.EMBED, "fast", lengths=(20,), prompt_tokens=20)
        answer = PlannedRequest(
            f"{n}-answer", at, Kind.GENERATE, "fast", prompt_tokens=9, output_tokens=5, after=query.id
        )
        found += [query, answer]
        if n % 2 == 0:
            found.append(PlannedRequest(f"{n}-doc", at, Kind.EMBED, "slow", lengths=(50,), prompt_tokens=50))
    return found


def test_a_part_of_the_workload_has_the_proportions_asked_for():
    demand = demand_of(requests, 10.0, sample=1_000, most=None, seed=0)
    assert set(demand.rates) == {"fast/embedding", "fast/llm", "slow/embedding"}
    wanted = {"fast/llm": 2.0, "slow/embedding": 4.0}
    part = demand.part(wanted)(3.0, 0.0, 1_000.0)
    counts = {name: sum(part_name(request) == name for request in part) for name in demand.rates}
    assert counts["fast/embedding"] == 0
    assert counts["slow/embedding"] == pytest.approx(2 * counts["fast/llm"], rel=0.1)
    # The query of an answer is elsewhere, so the answer waits for nothing here.
    assert all(request.after is None for request in part)
    whole = demand.part(demand.rates)(10.0, 0.0, 100.0)
    assert any(request.after is not None for request in whole)


def test_the_busiest_window_of_a_log():
    assert busiest_rate([0.0, 1.0, 2.0, 3.0], 300.0) == pytest.approx(1.0)
    burst = [*(float(n) for n in range(100)), *(100 + n / 10 for n in range(100)), *range(110, 200)]
    assert busiest_rate(burst, 10.0) == pytest.approx(10.0)
