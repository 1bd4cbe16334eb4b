"""Other work during one measurement of a real server changes neither the objectives nor the capacity."""

import asyncio
from contextlib import closing

import pytest
import yaml

from benchmark_control_plane.judge.experiment_file import read_experiment
from benchmark_control_plane.judge.reference_system import saturation, unloaded
from benchmark_control_plane.simulator.virtual_time import VirtualTimeLoop
from tests.benchmark_control_plane.judge.test_measurement_stages import EXPERIMENT, Stage


class Disturbed:
    """Serves requests concurrently, each in 20 ms, and in 50 ms until a time on the clock of the loop."""

    def __init__(self, until):
        self.until, self.ids = until, []

    async def send(self, planned, answer):
        loop = asyncio.get_running_loop()
        self.ids.append(planned.id)
        answer.sent = loop.time()
        await asyncio.sleep(0.05 if loop.time() < self.until else 0.02)
        answer.ended = loop.time()


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "disturbed.yaml"
    content = EXPERIMENT | {"capacity": {"clients": 4, "probe_s": 2}}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return read_experiment(path, tmp_path)


@pytest.mark.parametrize(("is_real", "expected_ms"), [(True, 20), (False, 50)])
def test_unloaded_latency_is_the_least_median_of_three_rounds_on_a_real_server(
    experiment, is_real, expected_ms
):
    target = Disturbed(until=0.6)
    with closing(VirtualTimeLoop()) as loop:
        found = unloaded(experiment, Stage(target, is_real, loop), experiment.plan.systems[0])
    assert found["documents"]["e2e_ms"] == pytest.approx(expected_ms)
    assert len(set(target.ids)) == len(target.ids), "a repeated prompt may be in the server's prefix cache"


@pytest.mark.parametrize(("is_real", "expected_ms"), [(True, 20), (False, 50)])
def test_capacity_is_the_median_of_three_probes_on_a_real_server(experiment, is_real, expected_ms):
    target = Disturbed(until=2.5)
    with closing(VirtualTimeLoop()) as loop:
        rate = saturation(experiment, Stage(target, is_real, loop), experiment.plan.systems[0])
    assert rate == pytest.approx(4 * 1_000 / expected_ms, rel=0.06)
