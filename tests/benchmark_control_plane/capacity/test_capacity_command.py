"""`tandem capacity`: bound, simulation and what limits the rate, in plain text and as JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from backends.cost_models.step_time import affine, embedding_line, llm_only, sequential
from benchmark_control_plane.capacity import workload_source
from benchmark_control_plane.capacity.command import simulated_sections
from benchmark_control_plane.capacity.workload_source import logged_workload, read_workload
from benchmark_control_plane.decision_replay.recorded_traffic import read_traffic
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import SimulatedEmbedding, SimulatedRequest, simulate
from controlplane.config import load
from controlplane.service.decision_log.reader import read_log
from tests.benchmark_control_plane.bench_command import main

CHAT = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 2048, "vocab_size": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip
ENCODER = {**CHAT, "num_key_value_heads": 8, "max_position_embeddings": 512}
STREAMS = (
    "{chat: {kind: generate, service_class: fast, share: 3, prompt_tokens: {fixed: 200}, "
    "output_tokens: {between: [20, 60]}}, documents: {kind: embed, service_class: slow, share: 1, "
    "prompt_tokens: {fixed: 200}, batch: {fixed: 4}}}"
)
TIMES = ["--step", "0.01,2e-5,1e-4,0", "--embedding", "0.002,1e-5"]
QUICK = ["--requests", "100", "--steps", "0"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    for name, content in (("chat", CHAT), ("encoder", ENCODER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content), encoding="utf-8")
    content = {
        "models": {
            "chat": {"model": str(tmp_path / "chat"), "engine": {"max_num_seqs": 16, "max_model_len": 1024}},
            "embeddings": [{"model": str(tmp_path / "encoder"), "batch_tokens": 4096}],
        },
        "server": {"health_port": 8001},
        "predictors": {"encoder": str(tmp_path / "encoder"), "max_examples": 512},
        "pool": {"memory": "128MiB"},
        "classes": {
            "fast": {"ttft_ms": 500, "tpot_ms": 100, "default": True},
            "slow": {"e2e_ms": 5000, "sheddable": False},
        },
    }
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    machine = Machine(sequential(llm_only(affine(0.01, 2e-5, 1e-4, 1e-8)), embedding_line(0.002, 1e-5)))
    classes = {"fast": {"ttft_ms": 500, "default": True}, "slow": {"e2e_ms": 5_000}}
    offered = [
        SimulatedEmbedding(n / 10, (200, 50), "slow")
        if n % 4 == 0
        else SimulatedRequest(n / 10, 200, 20 + n % 40, 80, "fast", prefix_group=n % 2, prefix_tokens=64)
        for n in range(120)
    ]
    simulate(offered, machine, {"classes": classes, "decision_log": {"dir": str(folder), "sample": 0}})
    return folder


@pytest.mark.long
def test_traffic_and_times_of_a_log_are_a_workload(config, log, capsys):
    command = ["capacity", str(config), "--workload", str(log), "--requests", "80", "--steps", "0", "--json"]
    assert main(command) in (0, 3)
    facts = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in facts["simulated"]} == {None, "fast", "slow"}
    assert any("Step times are those of the log." in line for line in facts["assumptions"])
    rows = sorted(read_log(log).requests, key=lambda row: row["at"])
    planned = logged_workload(log, [load(config)], requests=80).plan(40.0, 0.5, 2.0)
    assert [request.service_class for request in planned] == [row["class"] for row in rows[:100]]
    assert planned[0].at == pytest.approx(-0.5) and planned[-1].at == pytest.approx(2.0)
    cached = [request for request in planned if request.prefix_tokens]
    assert len({request.prefix_group for request in cached}) == 2
    assert {request.prefix_tokens for request in cached} == {64}


@pytest.mark.long
def test_a_token_of_a_long_input_costs_what_the_log_has_learned(config, log, monkeypatch):
    traffic = read_traffic(log)
    costs = replace(traffic.costs, embedding=(0.002, 1e-5, 1e-7))
    monkeypatch.setattr(workload_source, "read_traffic", lambda path: replace(traffic, costs=costs))
    found = logged_workload(log, [load(config)], requests=80)
    # Inputs of 200 and 50 tokens: a token is in one of (200 * 200 + 50 * 50) / 250 = 170 tokens.
    assert found.embedding == (0.002, pytest.approx(1e-5 + 170 * 1e-7))


@pytest.mark.long
def test_a_logged_request_has_its_choices_and_the_tokens_that_its_client_waited_for(config, log, monkeypatch):
    traffic = read_traffic(log)
    changed = {1: {"sequences": 3}, 2: {"outcome": "aborted", "output_tokens": 7, "forecast": [70] * 5}}
    rows = [{**row, **changed.get(at, {})} for at, row in enumerate(traffic.rows)]
    monkeypatch.setattr(workload_source, "read_traffic", lambda path: replace(traffic, rows=rows))
    planned = logged_workload(log, [load(config)], requests=80).plan(40.0, 0.5, 2.0)
    assert [planned[at].choices for at in (1, 2)] == [3, 1]
    assert planned[2].output_tokens == 7


@pytest.mark.long
def test_facts_agree_with_each_other(config, capsys):
    command = ["capacity", str(config), "--workload", STREAMS, *TIMES, *QUICK, "--json"]
    assert main(command) == 0
    first = capsys.readouterr().out
    facts = json.loads(first)
    bound = facts["stability"]
    assert bound["stable_below"] <= bound["overloaded_above"] < bound["doubled"]
    assert bound["binding"] == "requests of a step"
    rates = {row["name"]: row for row in facts["simulated"]}
    assert set(rates) == {None, "fast", "slow"}
    assert rates[None]["rate"] <= min(rates["fast"]["rate"], rates["slow"]["rate"])
    assert bound["overloaded_above"] < bound["attainable_below"]
    assert max(row["rate"] for row in facts["attained"]) == pytest.approx(bound["attainable_below"])
    assert main(command) == 0
    assert capsys.readouterr().out == first


@pytest.mark.long
@pytest.mark.parametrize("name", ["all", "rate", "overall", "lowest"])
def test_a_class_may_have_any_name(config, capsys, name):
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    content["classes"][name] = content["classes"].pop("fast")
    config.write_text(yaml.safe_dump(content), encoding="utf-8")
    command = ["capacity", str(config), "--workload", STREAMS.replace("fast", name), *TIMES, *QUICK, "--json"]
    assert main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in facts["simulated"]] == [None, *sorted([name, "slow"])]
    assert facts["simulated"][0]["share"] == 1.0
    for at in facts["attained"]:
        assert at["classes"].keys() == {name, "slow"}
        assert at["lowest"] == min(at["classes"].values())
    assert len({at["rate"] for at in facts["attained"]}) == 5


@pytest.mark.long
def test_text_states_limit_and_assumptions(config, capsys):
    assert main(["capacity", str(config), "--workload", STREAMS, *TIMES, *QUICK]) == 0
    out = capsys.readouterr().out
    assert "What binds is requests of a step: twice as much would give" in out
    assert "Step times are those of --step and --embedding." in out
    assert "quotas are static" in out


@pytest.mark.long
def test_class_that_is_never_kept_gives_status_3(config, capsys):
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    content["classes"]["fast"] |= {"tpot_ms": 1, "sheddable": False}
    config.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert main(["capacity", str(config), "--workload", STREAMS, *TIMES, *QUICK, "--json"]) == 3
    fast = next(row for row in json.loads(capsys.readouterr().out)["simulated"] if row["name"] == "fast")
    assert fast["rate"] is None
    assert fast["limit"].startswith("TPOT missed")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "objectives"), [("slow", {"e2e_ms": 600_000}), ("fast", {"tpot_ms": 1_000})]
)
def test_a_class_that_no_queue_of_the_window_can_break_is_capped(config, capsys, name, objectives):
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    content["classes"][name] = {"default": name == "fast", "sheddable": False, **objectives}
    config.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert main(["capacity", str(config), "--workload", STREAMS, *TIMES, *QUICK, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    bound, highest = facts["stability"]["overloaded_above"], max(row["rate"] for row in facts["attained"])
    (met,) = (row["classes"][name] for row in facts["attained"] if row["rate"] == highest)
    assert met >= facts["attainment"] and highest > bound
    for each in (None, name):
        (found,) = (row for row in facts["simulated"] if row["name"] == each)
        assert found["rate"] <= bound
    assert found["rate"] == bound and found["limit"].startswith("queues grow above it")


@pytest.mark.long
def test_named_device_has_a_roofline(config, capsys):
    assert main(["capacity", str(config), "--workload", STREAMS, "--device", "l4-24", *QUICK]) in (0, 3)
    assert "roofline of l4-24, 24 GB, not measured" in capsys.readouterr().out


@pytest.mark.long
def test_memory_of_a_named_device_is_not_that_of_the_host(config, capsys, monkeypatch):
    monkeypatch.setattr("controlplane.service.preflight.probe.memory_bytes", lambda: 2**30)
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    config.write_text(yaml.safe_dump({**content, "pool": {"memory": "auto"}}), encoding="utf-8")
    assert main(["capacity", str(config), "--workload", STREAMS, "--device", "l4-24", *TIMES, *QUICK]) == 0
    # 24 GB less an eighth of reserve and a margin of a tenth.
    assert "of a pool of 17.59 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("workload", "more", "message"),
    [
        ("{a: {kind: generate, service_class: none, share: 1, prompt_tokens: {fixed: 5}, "
         "output_tokens: {fixed: 5}}}", [], "streams.a: class 'none' is not in the configuration's classes"),
        ("{a: {kind: generate, service_class: fast, share: 1, prompt_tokens: {fixed: 5000}, "
         "output_tokens: {fixed: 5}}}", [], "a request has 5,005 tokens and max_model_len is 1,024"),
        ("{a: {kind: sing}}", [], "--workload: streams.a.kind='sing'"),
        ("{}", [], "--workload: streams"),
        ("{a: [", [], "--workload: not YAML"),
        ("no-such.yaml", [], "no-such.yaml: No such file or directory"),
        ("LOG", ["--requests", "200"], "120 requests can be replayed, and --requests=200 needs 251"),
        (STREAMS, ["--attainment", "90"], "--attainment=90.0: should be above 0 and below 1"),
        (STREAMS, ["--requests", "3"], "--requests=3: should be from 50 to 100,000"),
        (STREAMS, ["--device", "h99"], "--device h99: unknown; choose one of"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(config, log, capsys, workload, more, message):
    workload = str(log) if workload == "LOG" else workload
    assert main(["capacity", str(config), "--workload", workload, *TIMES, *QUICK, *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


@pytest.mark.parametrize("given", ["0.01,x", "0,0,0,0", "0.01,0,0", "nan,0,0,0"])
def test_step_times_are_numbers(config, capsys, given):
    with pytest.raises(SystemExit, match="2"):
        main(["capacity", str(config), "--workload", STREAMS, "--step", given])
    assert f"{given}: should be 4 numbers of at least 0, not all of them 0" in capsys.readouterr().err


def test_bundled_workload_fits_the_packaged_classes():
    streams = read_workload("configs/workloads/rag.yaml")
    used = {name for s in streams.values() for name in (s.service_class, s.embed_class) if name}
    assert used <= set(load(Path("configs/colocated.yaml")).classes)


def test_sections_of_files_and_models_are_not_simulated():
    dropped: dict[str, dict] = {"models": {}, "server": {}, "tenants": {}}
    predictors = {"file": "x", "max_examples": 9}
    kept = simulated_sections({**dropped, "pool": {}, "predictors": predictors})
    assert kept == {"pool": {}, "predictors": {"max_examples": 9}}
