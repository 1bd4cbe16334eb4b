"""What the simulated target reports of a response and of its device."""

import asyncio

import pytest

from benchmark_control_plane.judge.records import PartialResponse
from benchmark_control_plane.judge.simulated_target import simulated_target
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from benchmark_control_plane.judge.workload import PlannedRequest
from benchmark_control_plane.simulator import virtual_time
from controlplane.core.decision import Outcome, Reason, Reject
from controlplane.core.request import Kind
from controlplane.service.ticket import Rejected


def test_the_longest_choice_counts_and_the_response_ends_with_the_last_token_of_any():
    device = SimulatedDeviceSection(step=(0.02, 0.0, 0.0, 0.0), max_running=2)
    planned = PlannedRequest("r", 0.0, Kind.GENERATE, "standard", prompt_tokens=8, output_tokens=5, choices=3)

    async def play() -> PartialResponse:
        answer = PartialResponse()
        async with simulated_target(device, {}, has_gate=False) as target:
            await target.send(planned, answer)
        return answer

    answer = virtual_time.run(play())
    assert answer.output_tokens == len(answer.tokens) == 5
    # There are places for two; the third choice begins after their five steps.
    assert answer.tokens[0] == pytest.approx(0.02)
    assert answer.tokens[-1] == pytest.approx(0.2)


def test_the_device_is_busy_for_the_steps_of_a_response_and_idle_afterwards():
    device = SimulatedDeviceSection(step=(0.02, 0.0, 0.0, 0.0))
    planned = PlannedRequest("r", 0.0, Kind.GENERATE, "standard", prompt_tokens=8, output_tokens=5)

    async def play() -> float:
        async with simulated_target(device, {}, has_gate=False) as target:
            await target.send(planned, PartialResponse())
            await asyncio.sleep(1.0)
            return (await target.sample())["busy_seconds"]

    assert virtual_time.run(play()) == pytest.approx(5 * 0.02)


@pytest.mark.parametrize(("is_evicted", "loss"), [(True, Outcome.EVICTED), (False, Outcome.REJECTED)])
def test_an_eviction_is_told_from_a_rejection(is_evicted, loss, monkeypatch):
    planned = PlannedRequest("e", 0.0, Kind.EMBED, "standard", lengths=(8,))

    async def play() -> PartialResponse:
        answer = PartialResponse()
        async with simulated_target(SimulatedDeviceSection(), {}, has_gate=True) as target:

            async def refused(job):
                raise Rejected(job.request, Reject(Reason.SLO_UNATTAINABLE, None), is_evicted=is_evicted)

            monkeypatch.setattr(target.service.gate, "embed", refused)
            await target.send(planned, answer)
        return answer

    assert virtual_time.run(play()).loss is loss
