"""`tandem replay` on logs of the simulator: it reproduces them, predicts, and refuses what it cannot."""

import gzip
import json
from dataclasses import replace

import numpy as np
import orjson
import pytest
import yaml

from backends.cost_models.step_time import affine, embedding_line, llm_only, sequential
from benchmark_control_plane.decision_replay.first_half_fit import with_host_delays
from benchmark_control_plane.decision_replay.recorded_traffic import _parts, expanded, read_traffic
from benchmark_control_plane.decision_replay.replay_command import sections_for
from benchmark_control_plane.decision_replay.replayed_requests import replayed_records
from benchmark_control_plane.decision_replay.self_check import check_replay
from benchmark_control_plane.decision_replay.sound_rows import is_sound
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import (
    SimulatedEmbedding,
    SimulatedRequest,
    arrival_times,
    simulate,
)
from controlplane.config import parse
from controlplane.service.decision_log.reader import read_log
from controlplane.service.decision_log.segment_files import segments
from tests.benchmark_control_plane.bench_command import main

pytestmark = pytest.mark.long

BATCH_TIME = sequential(llm_only(affine(0.04, 1e-4, 4e-4, 1e-7)), embedding_line(0.005, 5e-5))
MACHINE = Machine(
    BATCH_TIME, kv_bytes=900 * 16 * 1_024, max_model_tokens=1_024, max_running=32, step_tokens=256
)
CLASSES = {
    "interactive": {"priority": 5, "ttft_ms": 400, "tpot_ms": 60},
    "standard": {"priority": 1, "default": True, "sheddable": False, "ttft_ms": 4_000},
}
SECTIONS = {"classes": CLASSES, "admission": {"length_predictor": "history"}}
RATE, COUNT = 6.5, 1_000


def offered(rate=RATE, count=COUNT):
    rng = np.random.default_rng(3)
    found = []
    for n, at in enumerate(arrival_times(rng, rate, count, variation=1.5)):
        name = "interactive" if n % 3 else "standard"
        if n % 4 == 0:
            found.append(SimulatedEmbedding(at, tuple(int(t) for t in rng.integers(5, 200, 3)), name))
            continue
        output = min(int(rng.geometric(1 / 60)), 400)
        request = SimulatedRequest(at, int(rng.integers(40, 300)), output, 400, name)
        found.append(replace(request, prefix_group=n % 5, prefix_tokens=64))
    return found


def replay(*arguments):
    return main(["replay", *map(str, arguments)])


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    simulate(offered(), MACHINE, {**SECTIONS, "decision_log": {"dir": str(folder), "sample": 0}})
    return folder


def yaml_file(path, **sections):
    path.write_text(yaml.safe_dump({"models": {"chat": {"model": "m"}}, **sections}))
    return path


def test_time_before_the_gate_is_that_of_each_request_and_the_rest_a_median(tmp_path):
    # Well below capacity: above it the median of a class with few requests in time moves by 100 ms.
    calm = offered(rate=4.0, count=600)
    late = [replace(offer, host_delay=0.16 * (at % 2)) for at, offer in enumerate(calm)]
    simulate(late, MACHINE, {**SECTIONS, "decision_log": {"dir": str(tmp_path), "sample": 0}})
    logged = read_traffic(tmp_path)
    assert with_host_delays(logged).host_delays == pytest.approx({"embed": 0, "generate": 0}, abs=0.005)
    # As if the way from the engine to the client had taken longer.
    rows = [
        row | {name: row[name] + 80 for name in ("ttft_ms", "e2e_ms") if row.get(name) is not None}
        for row in logged.rows
    ]
    without = replace(logged, rows=rows)
    traffic = with_host_delays(without)
    assert traffic.host_delays == pytest.approx({"embed": 0.08, "generate": 0.08}, abs=0.005)
    with_delay, off = (
        {
            each.group: each.replayed - each.measured
            for each in check_replay(tried).figures
            if each.name == "p50_ms"
        }
        for tried in (traffic, without)
    )
    # A class with few served requests in one of the two has no median there.
    assert (both := with_delay.keys() & off.keys())
    assert all(abs(with_delay[group]) < 40 and off[group] < -60 for group in both), (with_delay, off)


def test_a_client_that_left_leaves_again_and_its_answer_is_not_known(tmp_path):
    impatient = [
        replace(offer, leaves_after=1.5) if number % 2 else offer
        for number, offer in enumerate(offered(rate=12.0, count=600))
    ]
    simulate(impatient, MACHINE, {**SECTIONS, "decision_log": {"dir": str(tmp_path), "sample": 0}})
    traffic = read_traffic(tmp_path)
    left = [number for number, row in enumerate(traffic.rows) if row["outcome"] == "aborted"]
    reading = [number for number in left if traffic.rows[number].get("output_tokens")]
    assert len(reading) > 100
    records = replayed_records(traffic, traffic.sections)
    again = [records[number] for number in left if records[number].outcome == "aborted"]
    assert len(again) > 0.6 * len(left)
    assert all(each.finished is None or each.finished - each.arrival < 1.51e9 for each in again)
    requests = traffic.offered(0)
    assert all(requests[number].leaves_after == pytest.approx(1.5, abs=0.01) for number in left)
    # In a configuration that serves it sooner it would have got more.
    assert any(requests[number].output_tokens > traffic.rows[number]["output_tokens"] for number in reading)
    assert all(traffic.imputed[number] for number in reading)


def test_a_log_of_the_simulator_is_reproduced_and_another_configuration_is_predicted(log, tmp_path, capsys):
    other = yaml_file(
        tmp_path / "b.yaml", classes=CLASSES, scheduling={"ordering": "fcfs", "engine": {"ordering": "fcfs"}}
    )
    assert replay(log, "--config", other, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["left_out"]) == (COUNT, [])
    check = found["self_check"]
    assert check["passed"] and check["verdict"] == []
    assert {tuple(each["group"]) for each in check["figures"]} == {
        (name, kind) for name in CLASSES for kind in ("embed", "generate")
    }
    measured = [
        row for row in read_log(log).requests if (row["class"], row["kind"]) == ("interactive", "generate")
    ]
    by_group = {tuple(each["group"]): each for each in found["what_if"]["classes"]}
    change = by_group["interactive", "generate"]
    assert change["requests"] == len(measured)
    assert change["measured"] == pytest.approx(np.mean([row["outcome"] == "met" for row in measured]))
    # What that configuration really does on the same device.
    truth = simulate(
        offered(), MACHINE, {**SECTIONS, "scheduling": {"ordering": "fcfs", "engine": {"ordering": "fcfs"}}}
    )
    numbers = [int(row["id"].partition("-")[0]) for row in measured]
    real = np.mean([truth.records[number].outcome == "met" for number in numbers])
    assert abs(change["predicted"] - real) <= max(0.03, change["error"])
    assert len(found["what_if"]["examples"]) == 10


def test_text_names_classes_and_what_was_left_out(log, tmp_path, capsys):
    (segment,) = segments(log)
    torn = tmp_path / segment.name.removesuffix(".gz")
    torn.write_bytes(gzip.decompress(segment.read_bytes())[:-7])
    assert replay(torn) == 0
    out = capsys.readouterr().out
    assert "left out: " in out and "torn" in out
    assert "interactive (generate)" in out and "not reproduced" not in out


def rewritten(log, folder, change):
    """A copy of the log with each row changed; None drops it."""
    (segment,) = segments(log)
    rows = [change(orjson.loads(line)) for line in gzip.decompress(segment.read_bytes()).splitlines()]
    text = b"\n".join(orjson.dumps(row) for row in rows if row is not None)
    (folder / segment.name.removesuffix(".gz")).write_bytes(text + b"\n")
    return folder


def test_a_wrong_model_of_the_device_is_found_and_nothing_is_predicted(log, tmp_path, capsys):
    def slower(row):
        if row["row"] == "steps" and row["llm"]:
            row["llm"] |= {key: 0.25 * row["llm"][key] for key in ("step_s", "decode_s", "prompt_token_s")}
        return row

    assert replay(rewritten(log, tmp_path, slower), "--json") == 3
    found = json.loads(capsys.readouterr().out)
    assert found["what_if"] is None
    assert any(
        "generate" in line and "model of the device is wrong" in line
        for line in found["self_check"]["verdict"]
    )


def test_a_saturated_system_is_told_from_a_wrong_model(tmp_path, capsys):
    logged, rescaled = tmp_path / "log", tmp_path / "rescaled"
    rescaled.mkdir()
    log = {"decision_log": {"dir": str(logged), "sample": 0}}
    simulate(offered(12.0, 1_280), MACHINE, {**SECTIONS, **log})

    def slower(row):
        if row["row"] == "steps" and row["llm"]:
            row["llm"] |= {key: 1.1 * row["llm"][key] for key in ("step_s", "decode_s", "prompt_token_s")}
        return row

    assert replay(rewritten(logged, rescaled, slower)) == 3
    # Of the retrievals so few are in time at this load that it cannot be told.
    verdicts = [line for line in capsys.readouterr().out.splitlines() if "(generate): " in line]
    assert {line.partition(" ")[0] for line in verdicts} == {"interactive", "standard"}
    assert all("the system was saturated" in line for line in verdicts)


def test_the_longest_part_under_one_configuration_is_used(log, tmp_path):
    rows = read_log(log).requests
    late = sorted(row["at"] for row in rows)[-200]

    def second(row):
        return [row, {**row, "version": 1, "at": late}] if row["row"] == "config" else row

    (segment,) = segments(log)
    lines = [second(orjson.loads(line)) for line in gzip.decompress(segment.read_bytes()).splitlines()]
    flat = [each for line in lines for each in (line if isinstance(line, list) else [line])]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(map(orjson.dumps, flat)) + b"\n")
    traffic = read_traffic(tmp_path)
    assert len(traffic.rows) == COUNT - 200
    assert any("200 requests" in line for line in traffic.left_out)


def test_the_part_of_a_request_is_found_without_reading_all_configurations_again():
    class CountedRows(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    starts = [("a", 0, 10), ("a", 1, 20), ("b", 0, 15), ("a", 1, 20)]
    configs = CountedRows({"run": run, "version": version, "at": at} for run, version, at in starts)
    requests = [{"run": run, "at": at} for run, at in [("a", 5), ("a", 19), ("a", 20), ("b", 99), ("c", 1)]]
    assert _parts(requests, configs) == [("a", 0), ("a", 0), ("a", 1), ("b", 0), ("c", 0)]
    assert configs.passes == 1


def test_prefixes_of_the_log_are_prefixes_of_the_replay(log):
    traffic = read_traffic(log)
    requests = traffic.offered(0)
    cached = [
        (row, offer) for row, offer in zip(traffic.rows, requests, strict=True) if row.get("cached_tokens")
    ]
    assert cached
    earlier = set()
    for row, offer in zip(traffic.rows, requests, strict=True):
        if row["kind"] == "generate":
            # Made when the request is sent: the token ids of all requests of a day would be gigabytes.
            prompt = offer.prompt()
            assert len(prompt) == row["prompt_tokens"]
            if row.get("cached_tokens"):
                assert tuple(prompt[:16]) in earlier
            earlier.add(tuple(prompt[:16]))


def test_quotas_of_another_configuration_are_replayed_though_the_log_states_none(log):
    quota = {"llm": {"nominal": 0.7}, "embedding": {"nominal": 0.3}}
    models = {"chat": {"model": "m"}, "embeddings": [{"model": "e"}]}
    other = parse({"models": models, "classes": CLASSES, "quota": quota})
    traffic = read_traffic(log)
    assert "quota" not in traffic.sections
    assert sections_for(traffic, log, other, source="b.yaml")["quota"]["llm"]["nominal"] == 0.7
    alone = {**traffic.config, "machine": {**traffic.config["machine"], "embedders": {}}}
    assert "quota" not in sections_for(replace(traffic, config=alone), log, other, source="b.yaml")


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"classes": {"standard": {"default": True}}}, "interactive"),
        ({"classes": CLASSES, "admission": {"max_waitin": 1}}, "max_waitin"),
        ({"classes": CLASSES, "tenants": {"t": {"api_keys_sha256": ["0" * 64]}}}, "tenant-salt"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(log, tmp_path, capsys, sections, says):
    alone = rewritten(log, tmp_path, lambda row: row)
    assert replay(alone, "--config", yaml_file(tmp_path / "b.yaml", **sections)) == 2
    assert says in capsys.readouterr().err


def test_a_refusal_says_whose_configuration_it_is(log, tmp_path, capsys):
    def of_an_earlier_release(row):
        if row["row"] == "config":
            row["config"]["admission"] = {"max_waitin": 1}
        return row

    (tmp_path / "old").mkdir()
    assert replay(rewritten(log, tmp_path / "old", of_an_earlier_release)) == 2
    assert "this release refuses the configuration in the log: " in capsys.readouterr().err
    models = {"chat": {"model": "m"}, "embeddings": [{"model": "e"}]}
    quotas = {"pool": {"kv_allocator": "kvcached"}, "quota": {"policy": "dynamic"}}
    moving = yaml_file(tmp_path / "b.yaml", models=models, classes=CLASSES, **quotas)
    assert replay(log, "--config", moving) == 2
    assert f"{moving}: the server refuses it on the machine of the log: " in capsys.readouterr().err


def test_hostile_logs_are_refused(log, tmp_path, capsys):
    assert replay(tmp_path / "none") == 2
    assert replay(tmp_path) == 2
    (tmp_path / "a.jsonl").write_bytes(
        b'{"row": "segment", "at": 1, "schema": 9, "run": "r", "segment": 0}\n'
    )
    assert replay(tmp_path) == 2
    assert "schema version 9" in capsys.readouterr().err
    (tmp_path / "steps").mkdir()
    without_models = rewritten(log, tmp_path / "steps", lambda row: None if row["row"] == "steps" else row)
    assert replay(without_models) == 2
    assert "no model of the step times" in capsys.readouterr().err
    (tmp_path / "few").mkdir()
    few = rewritten(
        log, tmp_path / "few", lambda row: None if row["row"] == "request" and row["at"] > 10**6 else row
    )
    assert replay(few) == 2
    assert "requests can be replayed" in capsys.readouterr().err


def test_a_damaged_description_of_the_machine_is_refused(log, tmp_path, capsys):
    def without_sizes(row):
        return (
            {**row, "machine": {"generators": {"m": {}}, "embedders": {}}} if row["row"] == "config" else row
        )

    assert replay(rewritten(log, tmp_path, without_sizes)) == 2
    assert "lacks a field" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_tokens": 10**12},
        {"sequences": 10**9},
        {"id": "x-y"},
        {"max_output_tokens": None},
        {"blocks": [[0, 10**9]]},
        {"blocks": [[10**18, 1]]},
        {"blocks": "x"},
        {"forecast": [5, 4, 3, 2, 1]},
        {"forecast": [1]},
        {"slo_ms": {"ttft": "soon"}},
        {"slo_ms": {"speed": 1}},
        {"output_tokens": -1},
        {"ttft_ms": "1"},
        {"decisions": [1]},
        {"decisions": [{"decision": "ADMIT", "at_ms": None}]},
        {"decisions": [{"at_ms": -1}]},
        {"kind": "other"},
        {"kind": "embed"},
        {"kind": "embed", "input_tokens": [0]},
    ],
)
def test_a_row_that_no_request_can_have_is_not_replayed(log, change):
    row = next(row for row in read_log(log).requests if row["kind"] == "generate")
    assert is_sound(row)
    assert not is_sound(row | change)


def test_a_row_of_a_server_that_has_seen_many_blocks_is_replayed(log):
    row = next(row for row in read_log(log).requests if row["kind"] == "generate")
    assert is_sound(row | {"blocks": [[10**9, 1]], "prompt_tokens": 64})


def test_thinned_lengths_are_expanded_to_as_many():
    assert expanded([3, 5], 2) == [3, 5]
    found = expanded([1, 5, 9], 301)
    assert (len(found), found[0], found[150], found[-1]) == (301, 1, 5, 9)
