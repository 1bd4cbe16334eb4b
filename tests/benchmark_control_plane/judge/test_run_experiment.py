"""Whole experiments on the simulated device, in virtual time."""

import asyncio
import io
import json
import signal
from threading import Thread
from unittest.mock import MagicMock

import pytest
import yaml

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.experiments.client_accuracy.scripted_server import ServerDelays, listening
from benchmark_control_plane.judge.experiment_file import classes_section, read_experiment
from benchmark_control_plane.judge.memory_sampler import MemorySampler, parse_metrics
from benchmark_control_plane.judge.reference_system import objectives_from
from benchmark_control_plane.judge.run_experiment import _ExperimentRun, run_experiment
from benchmark_control_plane.judge.system_schema import Endpoint, Endpoints, Split, SystemSection
from benchmark_control_plane.report.aggregates import median_rate
from tests.benchmark_control_plane.bench_command import main

EXPERIMENT = {
    "name": "small",
    "question": "How much does the gate improve attainment?",
    "loads": [0.5, 2.0],
    "seeds": [0, 1],
    "reference": "ungated",
    "window": {"warmup_s": 1, "measured_s": 5, "drain_s": 30},
    "capacity": {"clients": 64, "probe_s": 5},
    "frontier": {"targets": [0.9], "steps": 1},
    # A slow device, so that few requests are a load.
    "device": {"kv_memory": "512MiB", "step": [0.027, 8e-5, 3e-4, 4e-8], "embedding": [0.012, 1.6e-5]},
    "classes": {
        "interactive": {"priority": 2, "times_unloaded": {"ttft": 10, "tpot": 3}},
        "documents": {"priority": 1, "e2e_ms": 2_000},
    },
    "streams": {
        "chat": {"kind": "generate", "service_class": "interactive", "share": 3,
                 "prompt_tokens": {"between": [50, 400]}, "output_tokens": {"preset": "short"}},
        "rag": {"kind": "retrieval", "service_class": "interactive", "embed_class": "documents", "share": 1,
                "prompt_tokens": {"fixed": 800}, "output_tokens": {"fixed": 20},
                "query_tokens": {"fixed": 10}},
    },
    "systems": [
        {"name": "tandem", "kind": "tandem", "simulated": {}},
        {"name": "ungated", "kind": "baseline", "ungated": True},
    ],
}  # fmt: skip


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT), encoding="utf-8")
    return path


def kept(out):
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    lines = (out / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    return results, [json.loads(line) for line in lines]


@pytest.mark.long
def test_experiment_writes_results_and_all_requests(experiment, tmp_path):
    assert run_experiment(experiment, tmp_path / "out") == 0
    results, requests = kept(tmp_path / "out")
    assert results["format"] == 1 and not results["partial"]
    grid = {(r["system"], r["load"], r["seed"]) for r in results["runs"]}
    assert {(s, load, seed) for s in ("tandem", "ungated") for load in (0.5, 2) for seed in (0, 1)} <= grid
    for number, entry in enumerate(results["runs"]):
        mine = [r for r in requests if r["run"] == number and not r["warmup"]]
        assert entry["valid"], entry["why_invalid"]
        assert entry["offered_rps"] == len(mine) / 5
        assert entry["attainment"]["overall"] == pytest.approx(
            sum(r["outcome"] == "MET" for r in mine) / len(mine)
        )
    frontier = {(f["system"], f["target"]): f for f in results["max_goodput_rate"]}
    assert set(frontier) == {("tandem", 0.9), ("ungated", 0.9)}
    assert all(len(f["per_seed"]) == 2 for f in frontier.values())
    assert results["slos"]["interactive"]["ttft_ms"] == pytest.approx(
        10 * results["unloaded_ms"]["interactive"]["ttft_ms"]
    )
    tandem, ungated = (next(r for r in results["runs"] if r["system"] == s) for s in ("tandem", "ungated"))
    assert set(tandem["memory"]["by_owner"]) == set(ungated["memory"]["by_owner"]) == {"embedding", "llm"}
    assert max(ungated["memory"]["by_owner"]["llm"]) > 0
    tax = [(r["engine"]["preemptions"], r["engine"]["recompute_tokens"]) for r in results["runs"]]
    assert max(tax)[0] > 0 and all((tokens > 0) == (count > 0) for count, tokens in tax)
    assert tandem["decisions"]["admit"] > 0


@pytest.mark.long
def test_runs_at_the_planned_loads_have_a_bound_that_none_exceeds(experiment, tmp_path, capsys):
    out = tmp_path / "out"
    run_experiment(experiment, out, seeds=[0])
    results, _ = kept(out)
    for run in results["runs"]:
        assert ("bound" in run) == (run["load"] in (0.5, 2.0))
        if bound := run.get("bound"):
            assert bound["feasible"] <= bound["attainment"] <= 1
            assert run["attainment"]["overall"] <= bound["attainment"]
    for run in results["runs"]:
        run.pop("bound", None)
    before, _ = kept(out)
    (out / "results.json").write_text(json.dumps(results), encoding="utf-8")
    assert main(["bench", "bound", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["bounded"] == 4 < facts["runs"] == len(results["runs"])
    assert kept(out)[0] == before


@pytest.mark.long
def test_results_that_offered_other_requests_get_no_bound(experiment, tmp_path, capsys):
    out = tmp_path / "out"
    run_experiment(experiment, out, seeds=[0], is_quick=True)
    results, _ = kept(out)
    for run in results["runs"]:
        run["offered_rps"] += 1
    (out / "results.json").write_text(json.dumps(results), encoding="utf-8")
    assert main(["bench", "bound", str(out)]) == 2
    assert "no run gets a bound" in capsys.readouterr().err


@pytest.mark.long
def test_experiment_is_deterministic(experiment, tmp_path):
    for name in ("first", "second"):
        run_experiment(experiment, tmp_path / name, seeds=[3], is_quick=True)
    (first, one), (second, other) = kept(tmp_path / "first"), kept(tmp_path / "second")
    assert one == other and len(one) > 100
    assert first["runs"] == second["runs"]


class CtrlC(io.StringIO):
    """A terminal whose user presses Ctrl-C when the third run is reported."""

    def write(self, text):
        if text.startswith("[3/"):
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.mark.long
def test_interrupted_experiment_keeps_completed_runs(experiment, tmp_path, monkeypatch):
    terminal = CtrlC()
    monkeypatch.setattr("sys.stderr", terminal)
    # Tests started in the background inherit an ignored SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run_experiment(experiment, tmp_path / "out") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    results, requests = kept(tmp_path / "out")
    assert results["partial"] and len(results["runs"]) == 3
    assert {r["run"] for r in requests} == {0, 1, 2}
    assert "interrupted; 3 runs are kept" in terminal.getvalue()

    with (tmp_path / "out" / "requests.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(requests[0] | {"run": 3}) + '\n{"run":3,"id"')  # What a kill leaves.
    monkeypatch.setattr("sys.stderr", reported := io.StringIO())
    assert run_experiment(experiment, tmp_path / "out", is_resumed=True) == 0
    assert "continuing with 3 runs" in reported.getvalue() and "[1/5]" in reported.getvalue()
    assert run_experiment(experiment, tmp_path / "whole") == 0
    (continued, one), (whole, other) = kept(tmp_path / "out"), kept(tmp_path / "whole")
    assert not continued["partial"] and one == other
    for name in ("runs", "max_goodput_rate", "capacity_rps", "slos", "systems"):
        assert continued[name] == whole[name]


@pytest.mark.long
def test_absent_server_is_one_line(tmp_path, capsys):
    endpoint = {"url": "http://127.0.0.1:9", "model": "m"}
    nowhere = {"name": "there", "kind": "baseline", "endpoints": {"chat": endpoint, "embeddings": endpoint}}
    path = tmp_path / "nowhere.yaml"
    path.write_text(
        yaml.safe_dump(EXPERIMENT | {"systems": [nowhere], "reference": "there"}), encoding="utf-8"
    )
    assert main(["bench", "run", str(path), "--out", str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "system 'there' does not answer" in lines[-1]
    assert kept(tmp_path / "out")[0]["partial"]


class StopsServerOnReport(io.StringIO):
    """A terminal that stops the server when the first run is reported."""

    def __init__(self, stop):
        super().__init__()
        self.stop = stop

    def write(self, text):
        if text.startswith("[1/"):
            self.stop()
        return super().write(text)


@pytest.fixture
def server():
    """(URL, function that stops it) of a server in its own thread."""
    loop = asyncio.new_event_loop()
    listener = loop.run_until_complete(listening(ServerDelays(first=0.001, gap=0.001), 0))
    thread = Thread(target=loop.run_forever)
    thread.start()

    async def close():
        listener.close()

    yield (
        f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}",
        lambda: asyncio.run_coroutine_threadsafe(close(), loop).result(),
    )
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.long
def test_lost_server_keeps_completed_runs_and_report(server, tmp_path, monkeypatch):
    url, stop = server
    chat = EXPERIMENT["streams"]["chat"] | {"output_tokens": {"fixed": 2}}
    there = {"name": "there", "kind": "baseline", "endpoints": {"chat": {"url": url, "model": "m"}}}
    window = {"warmup_s": 0, "measured_s": 0.3, "drain_s": 5, "lateness_limit_ms": 60_000}
    content = EXPERIMENT | {
        "streams": {"chat": chat}, "systems": [there], "reference": "there", "window": window,
        "capacity": {"rps": 40}, "classes": {"interactive": {"ttft_ms": 500}},
    }  # fmt: skip
    path = tmp_path / "away.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    terminal = StopsServerOnReport(stop)
    monkeypatch.setattr("sys.stderr", terminal)
    assert main(["bench", "run", str(path), "--out", str(tmp_path / "out")]) == 2
    results, requests = kept(tmp_path / "out")
    assert results["partial"] and len(results["runs"]) == 1 and requests
    assert "'there' does not answer" in terminal.getvalue() and "1 runs are kept" in terminal.getvalue()
    assert "Partial." in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("per_seed", "rate"),
    [
        ([4.0, 6.0, 5.0], 5.0),
        ([None, 6.0, 5.0], 5.0),
        ([None, None, 5.0, 6.0, 7.0], 5.0),
        ([None, 5.0], None),
        ([None, 6.0, 5.0, 7.0], 5.5),
        ([None, None, 5.0], None),
    ],
)
def test_seed_without_a_rate_counts_as_the_lowest(per_seed, rate):
    assert median_rate(per_seed) == rate


def test_given_seeds_replace_those_of_every_system(tmp_path):
    systems = [EXPERIMENT["systems"][0], EXPERIMENT["systems"][1] | {"seeds": [1]}]
    path = tmp_path / "seeds.yaml"
    small = {"systems": systems, "loads": [0.5], "frontier": {"targets": [0.9], "steps": 0}}
    path.write_text(yaml.safe_dump(EXPERIMENT | small), encoding="utf-8")
    assert run_experiment(path, tmp_path / "out", seeds=[7]) == 0
    results, _ = kept(tmp_path / "out")
    assert [(run["system"], run["seed"]) for run in results["runs"]] == [("tandem", 7), ("ungated", 7)]


def test_missing_data_is_one_line(tmp_path, capsys):
    streams = {
        "code": {"kind": "generate", "service_class": "interactive", "share": 1,
                 "trace": {"name": "azure-code"}}
    }  # fmt: skip
    path = tmp_path / "trace.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | {"streams": streams}), encoding="utf-8")
    arguments = ["bench", "run", str(path), "--out", str(tmp_path / "out"), "--data", str(tmp_path)]
    assert main(arguments) == 2
    assert "azure2023_code.csv.gz: No such file" in capsys.readouterr().err.splitlines()[-1]


def test_multiple_of_an_unmeasured_latency_is_rejected(experiment, tmp_path):
    plan = read_experiment(experiment, tmp_path).plan
    with pytest.raises(BadInput, match=r"classes\.interactive\.times_unloaded\.ttft"):
        objectives_from(plan, {"documents": {"e2e_ms": 5.0}})


def test_invalid_runs_count_in_no_rate(tmp_path):
    path = tmp_path / "cut.yaml"
    window = {"warmup_s": 1, "measured_s": 3, "drain_s": 0.01}
    small = {"loads": [0.5], "seeds": [0], "frontier": {"targets": [0.9], "steps": 2}, "window": window}
    path.write_text(yaml.safe_dump(EXPERIMENT | small), encoding="utf-8")
    assert run_experiment(path, tmp_path / "out") == 0
    results, _ = kept(tmp_path / "out")
    assert results["runs"] and not any(run["valid"] for run in results["runs"])
    assert results["max_goodput_rate"] == []


def test_a_system_is_not_said_to_miss_a_target_at_loads_that_it_was_not_offered(tmp_path):
    systems = [EXPERIMENT["systems"][0] | {"loads": [2.0]}, EXPERIMENT["systems"][1] | {"seeds": [1]}]
    path = tmp_path / "loads.yaml"
    small = {"systems": systems, "frontier": {"targets": [0.9], "steps": 0}}
    path.write_text(yaml.safe_dump(EXPERIMENT | small), encoding="utf-8")
    assert run_experiment(path, tmp_path / "out") == 0
    results, _ = kept(tmp_path / "out")
    assert len(results["runs"]) == 4
    assert [(f["system"], f["seeds"], len(f["per_seed"])) for f in results["max_goodput_rate"]] == [
        ("ungated", [1], 1)
    ]


def test_slo_scale_multiplies_every_objective(tmp_path):
    path = tmp_path / "strict.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | {"slo_scale": 0.5}), encoding="utf-8")
    alone = {"interactive": {"ttft_ms": 6.0, "tpot_ms": 2.0}}
    assert objectives_from(read_experiment(path, tmp_path).plan, alone) == {
        "interactive": {"ttft_ms": 30.0, "tpot_ms": 3.0}, "documents": {"e2e_ms": 1_000.0}
    }  # fmt: skip


def test_the_longest_gap_is_an_objective(tmp_path):
    path = tmp_path / "gap.yaml"
    classes = EXPERIMENT["classes"] | {
        "interactive": {"priority": 2, "times_unloaded": {"gap": 4}}, "documents": {"gap_ms": 250}
    }  # fmt: skip
    path.write_text(yaml.safe_dump(EXPERIMENT | {"classes": classes}), encoding="utf-8")
    plan = read_experiment(path, tmp_path).plan
    stated = objectives_from(plan, {"interactive": {"gap_ms": 20.0}})
    assert stated == {"interactive": {"gap_ms": 80.0}, "documents": {"gap_ms": 250.0}}
    assert classes_section(plan, stated)["interactive"]["gap_ms"] == 80.0


PAGE = b"""# HELP tandem_held_bytes Bytes
tandem_held_bytes{owner="llm"} 5.0e+06
tandem_quota_bytes{owner="llm"} 8e6
tandem_engine_used_bytes{owner="llm"} 9e6
tandem_engine_preemptions_total{owner="llm"} 3.0
tandem_engine_recompute_tokens_total{owner="llm"} 500.0
tandem_held_bytes{owner="embedding"} 10
tandem_prefix_cache_queries_total{class="a"} 60.0
tandem_prefix_cache_queries_total{class="b"} 40.0
tandem_prefix_cache_hits_total{class="a"} 30.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
"""


def test_memory_is_parsed_from_both_servers_metrics():
    tandem = parse_metrics(PAGE.partition(b"vllm")[0], None)
    assert tandem["held:llm"] == 5e6 and tandem["used:llm"] == 9e6 and tandem["preemptions"] == 3
    assert tandem["recompute_tokens"] == 500
    assert (tandem["queries"], tandem["hits"]) == (100, 30)
    vllm = parse_metrics(PAGE[PAGE.index(b"vllm") :], 1_000)
    assert vllm == {"used:llm": 250.0, "quota:llm": 1_000.0, "preemptions": 2.0}


def test_memory_sampler_summarises_its_samples():
    first = parse_metrics(PAGE.partition(b"vllm")[0], None)
    later = {**first, "used:llm": 1e6, "preemptions": 7.0, "queries": 300.0, "hits": 80.0}
    watch = MemorySampler([0.0, 0.5], [first, later])
    assert watch.memory()["by_owner"]["llm"] == [9e6, 1e6]
    # 9 and then 1 of 8 MB of quota, and 10 bytes of an owner without one.
    assert watch.engine(30.0) == {
        "preemptions": 4, "recompute_tokens": 0, "overflow": 0.5, "cache_hit": 0.25,
        "memory_use": pytest.approx(0.62500125), "device_busy": None,
    }  # fmt: skip
    assert MemorySampler().memory() is None and MemorySampler().engine(30.0) is None


def test_the_busy_share_of_a_device_is_that_of_the_measured_window():
    totals = {-1.0: 0.5, 0.0: 1.0, 5.0: 3.0, 10.0: 5.0, 11.0: 6.0}
    watch = MemorySampler(list(totals), [{"busy_seconds": total} for total in totals.values()])
    engine = watch.engine(10.0)
    assert engine is not None and engine["device_busy"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("system", "is_stated"),
    [
        (SystemSection("pair", "baseline", split=Split()), True),
        (SystemSection("far", "baseline", endpoints=Endpoints(chat=Endpoint("http://far", "m"))), False),
        (SystemSection("gate", "tandem", simulated={}), False),
    ],
    ids=["started servers", "reached servers", "simulated"],
)
def test_a_run_of_started_servers_states_other_processes_and_the_speed(tmp_path, system, is_stated):
    entry = {"valid": True, "attainment": {"overall": 1.0}}
    bench, results = MagicMock(), MagicMock()
    bench.run.return_value = (entry, [])
    results.attained.return_value = None
    run = _ExperimentRun(bench, MagicMock(), results, tmp_path, MagicMock())
    assert run.measure(MagicMock(), system, 1.0, 0) == 1.0
    (stored, _), _ = results.add.call_args
    assert (stored.get("other_cores", -1.0) >= 0) is is_stated
    assert (stored.get("work_ms", 0.0) > 0) is is_stated
    assert (stored.get("busy_work_ms", 0.0) > 0) is is_stated
