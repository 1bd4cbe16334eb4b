"""The log of a simulated service: each request once, equal logs of equal runs, no effect on decisions."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from backends.cost_models.step_time import affine, embedding_line, llm_only, sequential
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import (
    SimulatedEmbedding,
    SimulatedRequest,
    arrival_times,
    simulate,
)
from controlplane.config import parse
from controlplane.config.redacted import redacted_values
from controlplane.service.decision_log.log_rows import logged_history, thinned
from controlplane.service.decision_log.reader import read_log
from controlplane.service.decision_log.segment_files import segments

pytestmark = pytest.mark.long

MACHINE = Machine(
    sequential(llm_only(affine(0.02, 1e-4, 1e-4, 1e-7)), embedding_line(0.005, 1e-5)),
    kv_bytes=96 * 16 * 1024, max_model_tokens=512, max_running=16, step_tokens=256,
)  # fmt: skip
CLASSES = {
    "interactive": {"priority": 5, "ttft_ms": 1000},
    "standard": {"priority": 1, "default": True, "sheddable": False},
}
SECTIONS = {"classes": CLASSES, "admission": {"length_predictor": "history", "max_waiting": 4}}


def offered(count=150, rate=60.0):
    rng = np.random.default_rng(0)
    found = []
    for n, at in enumerate(arrival_times(rng, rate, count, variation=2.0)):
        name = "interactive" if n % 3 else "standard"
        if n % 4 == 0:
            found.append(SimulatedEmbedding(at, tuple(int(t) for t in rng.integers(5, 200, 3)), name))
        else:
            output = int(rng.integers(1, 80))
            request = SimulatedRequest(at, int(rng.integers(40, 300)), output, output + 20, name)
            found.append(replace(request, prefix_group=n % 5, prefix_tokens=40))
    return found


def logged(folder, sections=SECTIONS, sample=1.0, **log):
    result = simulate(
        offered(), MACHINE, {**sections, "decision_log": {"dir": str(folder), "sample": sample, **log}}
    )
    return result, read_log(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return logged(tmp_path_factory.mktemp("log"))


def logged_time(ms):
    """Rows have times in steps of 0.1 ms, from 100 ms on of 1 ms and at least four digits."""
    return pytest.approx(ms, abs=0.1 if ms < 100 else 1.0, rel=1e-3)


def test_each_request_has_one_row_that_agrees_with_what_its_client_saw(run):
    result, log = run
    rows = {int(row["id"].partition("-")[0]): row for row in log.requests}
    assert len(rows) == len(log.requests) == len(result.records) == 150
    assert log.left_out == []
    seen = {row["outcome"] for row in log.requests}
    assert {"met", "rejected"} <= seen
    for record in result.records:
        row = rows[record.number]
        assert row["outcome"] == record.outcome.partition(":")[0]
        assert row["at"] == record.arrival // 100_000 * 100
        if row["outcome"] == "rejected":
            assert row["decisions"][-1]["decision"] == "REJECT"
            assert row["decisions"][-1]["reason"] == record.outcome.removeprefix("rejected: ")
            continue
        assert row["e2e_ms"] == logged_time((record.finished - record.arrival) / 1e6)
        if row["kind"] == "generate":
            assert row["output_tokens"] == record.output_tokens
            assert row["ttft_ms"] == logged_time((record.first_token - record.arrival) / 1e6)


def test_a_decision_has_its_reason_and_numbers(run):
    rows = run[1].requests
    refused = [each for row in rows for each in row["decisions"] if each["decision"] in ("DEFER", "REJECT")]
    assert refused
    assert all(each["reason"] and len(each["numbers"]) == 15 for each in refused)
    found = logged_history(next(row for row in rows if row["outcome"] == "rejected"), CLASSES["standard"])
    (*_, last) = found["decisions"]
    assert last["memory"]["ceiling_bytes"] > 0
    assert last["places"]["running"] >= 0
    assert found["measured"]["preemptions"] == {"gate": 0, "engine": 0}


def test_without_sampling_the_decisions_have_no_numbers_and_all_else_is_there(tmp_path, run):
    _, log = logged(tmp_path, sample=0)
    plain = [
        {k: v for k, v in row.items() if k not in ("predicted_ttft_ms", "gap_ms")}
        | {"decisions": [{k: v for k, v in each.items() if k != "numbers"} for each in row["decisions"]]}
        for row in run[1].requests
    ]
    assert list(log.requests) == plain


def test_the_log_changes_no_decision_and_is_the_same_each_time(tmp_path, run):
    assert simulate(offered(), MACHINE, SECTIONS).trace_hash == run[0].trace_hash
    (first, second) = (tmp_path / "a", tmp_path / "b")
    logged(first)
    logged(second)

    def content(folder):
        text = b"".join(gzip.decompress(path.read_bytes()) for path in segments(folder))
        return text.replace(str(folder).encode(), b"FOLDER").split(b"\n")[2:]

    assert content(first) == content(second)


def test_models_memory_and_configuration_are_logged(run):
    log = run[1]
    (config,) = log.configs
    assert parse(config["config"]).classes.keys() == CLASSES.keys()
    assert config["machine"]["generators"]["simulated"]["kv_bytes"] == 96 * 16 * 1024
    assert config["machine"]["embedders"]["simulated-embedding"]["sharing"] == "turns"
    last = log.steps[-1]
    assert last["llm"]["step_s"] == pytest.approx(0.02, rel=0.1)
    assert last["passes"]["simulated-embedding"]["base_s"] == pytest.approx(0.005, rel=0.02)
    assert last["passes"]["simulated-embedding"]["token_s"] == pytest.approx(1e-5, rel=0.02)
    at = [row["at"] for row in log.samples]
    assert set(np.diff(at)) == {1_000_000}
    assert {"held_bytes", "waiting", "running"} <= log.samples[0]["owners"]["llm"].keys()


def test_a_request_that_repeats_a_rejected_one_names_it(run):
    # Simulated clients do not retry; their client ids differ.
    assert not any("retry_of" in row for row in run[1].requests)


def test_secrets_and_tenants_names_are_not_in_the_configuration_row():
    digest = "0123456789abcdef" * 4
    config = parse(
        {
            "models": {"chat": {"model": "m", "engine": {"hf_token": "abc", "max_num_batched_tokens": 64}}},
            "server": {
                "admin_key_sha256": digest,
                "metrics_key_sha256": digest,
                "router_key_sha256": digest,
                "port": 1,
            },
            "tenants": {"acme": {"api_keys_sha256": [digest], "weight": 2}},
            "scheduling": {"engine": "off"},
        }
    )
    found = redacted_values(config, lambda name: "t1")
    text = json.dumps(found)
    assert digest not in text and "acme" not in text and "abc" not in text
    again = parse(found)
    assert again.models.chat.engine["max_num_batched_tokens"] == 64
    assert (again.server.port, again.tenants["t1"].weight, again.engine_options()) == (1, 2.0, None)


def test_times_and_numbers_have_four_digits_and_keep_their_order(run):
    times = [
        value
        for row in run[1].requests
        for each in [row, *row["decisions"]]
        for key, value in each.items()
        if key.endswith("_ms") and isinstance(value, int | float)
    ]
    numbers = [
        value
        for row in run[1].requests
        for each in row["decisions"]
        for value in each.get("numbers", [])
        if value is not None
    ]
    assert max(times) > 1_000 and max(numbers) > 1e6
    assert all(value == float(f"{value:.4g}") for value in times + numbers)
    assert any(value != round(value) for value in times)
    for row in run[1].requests:
        at = [each["at_ms"] for each in row["decisions"]]
        assert at == sorted(at)
        assert row.get("queue_ms", 0) <= row.get("ttft_ms", row["e2e_ms"]) <= row["e2e_ms"]


def test_a_segment_is_smaller_than_by_the_usual_compression(tmp_path, run):
    logged(tmp_path)
    (path,) = segments(tmp_path)
    packed = path.read_bytes()
    assert len(packed) < 0.98 * len(gzip.compress(gzip.decompress(packed), 9))


def test_many_input_lengths_are_thinned_to_order_statistics():
    assert thinned([3, 1, 2]) == [1, 2, 3]
    found = thinned(range(1_000))
    assert (len(found), found[0], found[-1]) == (32, 0, 999)
