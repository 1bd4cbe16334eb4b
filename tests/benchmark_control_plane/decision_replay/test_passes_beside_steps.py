"""`tandem replay` on logs of machines whose passes and steps run at the same time."""

import gzip
from dataclasses import replace

import orjson
import pytest

from benchmark_control_plane.decision_replay.first_half_fit import with_host_delays
from benchmark_control_plane.decision_replay.recorded_traffic import read_traffic
from benchmark_control_plane.decision_replay.self_check import check_replay
from benchmark_control_plane.simulator.simulation import simulate
from controlplane.core.engine_reports import DeviceSharing
from controlplane.service.decision_log.segment_files import segments
from tests.benchmark_control_plane.decision_replay.test_replay_log import MACHINE, SECTIONS, offered

pytestmark = pytest.mark.long

# Each token takes as long to deliver as a step, so a median for all requests is not enough.
BESIDE = replace(
    MACHINE,
    sharing=DeviceSharing.IDLE,
    step_slowdown=1.8,
    pass_slowdown=3.0,
    step_spread=(0.8, 1.0, 1.2),
    delivery=(0.005, 0.002),
)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    # Long passes: a third of the time one is under way.
    requests = [
        replace(offer, lengths=(200,) * 20) if hasattr(offer, "lengths") else offer
        for offer in offered(rate=4.5)
    ]
    simulate(requests, BESIDE, {**SECTIONS, "decision_log": {"dir": str(folder), "sample": 0}})
    return folder


def rewritten(log, folder, change):
    """A copy of the log with each row changed."""
    (segment,) = segments(log)
    rows = [change(orjson.loads(line)) for line in gzip.decompress(segment.read_bytes()).splitlines()]
    path = folder / segment.name.removesuffix(".gz")
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return folder


def with_sharing(value):
    def change(row):
        if row["row"] == "config":
            for model in row["machine"]["embedders"].values():
                model.pop("sharing")
                if value is not None:
                    model["sharing"] = value
        return row

    return change


def test_what_the_log_does_not_state_is_fitted_and_the_log_is_reproduced(log):
    traffic = read_traffic(log)
    assert (traffic.machine.sharing, traffic.left_out) == (DeviceSharing.IDLE, [])
    assert max(traffic.machine.step_spread) == pytest.approx(1.2, abs=0.1)
    fitted = with_host_delays(traffic)
    assert fitted.step_factor == pytest.approx(1.0, abs=0.1)
    assert fitted.machine.step_slowdown == pytest.approx(1.8, abs=0.3)
    assert fitted.machine.pass_slowdown == pytest.approx(3.0, abs=0.3)
    constant, each = fitted.machine.delivery
    assert constant + 8 * each == pytest.approx(0.005 + 8 * 0.002, abs=0.008)
    assert fitted.host_delays == pytest.approx({"embed": 0.0}, abs=0.005)
    assert check_replay(fitted).has_passed


def test_in_turns_the_same_log_is_not_reproduced(log, tmp_path):
    traffic = read_traffic(rewritten(log, tmp_path, with_sharing("turns")))
    assert not check_replay(with_host_delays(traffic)).has_passed


@pytest.mark.parametrize(
    ("run", "worker", "pool", "sharing"),
    [
        ("a-simulated", {}, {}, "turns"),
        ("a-0f1e2d", {}, {}, "idle"),
        ("a-0f1e2d", {"idle_cpu_priority": False}, {}, "beside"),
        ("a-0f1e2d", {"device": "cuda:0"}, {}, "beside"),
        ("a-0f1e2d", {}, {"kv_allocator": "kvcached"}, "beside"),
    ],
)
def test_in_a_log_of_version_1_the_configuration_says_how_passes_share(
    log, tmp_path, run, worker, pool, sharing
):
    def first(row):
        if row["row"] == "segment":
            return row | {"schema": 1, "run": run}
        if row["row"] == "config":
            for model in row["config"]["models"]["embeddings"]:
                model.update(worker)
            row["config"]["pool"] = pool
        return with_sharing(None)(row)

    traffic = read_traffic(rewritten(log, tmp_path, first))
    assert traffic.machine.sharing == sharing
    said = [line for line in traffic.left_out if "schema version 1 does not say" in line]
    # Every simulator of that version ran passes and steps in turns.
    assert len(said) == (sharing != "turns")
    assert all(("not in the idle class" in line) == (sharing == "beside") for line in said)
