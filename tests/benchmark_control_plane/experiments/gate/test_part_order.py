"""A gate that orders embedding calls by one deadline and refuses them by a later one."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace

import pytest

from benchmark_control_plane.experiments.gate.part_order import (
    PartInstant,
    PartOrder,
    ordered_by_parts,
    values_by_part,
)
from benchmark_control_plane.judge.records import PartialResponse
from benchmark_control_plane.judge.simulated_target import simulated_target
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from benchmark_control_plane.judge.workflow_stages import WorkflowStage
from benchmark_control_plane.judge.workload import PlannedRequest
from benchmark_control_plane.simulator import virtual_time
from controlplane.core.clock import Duration
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind
from controlplane.policy.sharing.pass_size import PendingWork

# A pass takes a call, for a second.
DEVICE = SimulatedDeviceSection(
    step=(0.02, 0.0, 0.0, 0.0),
    embedding=(1.0, 0.0),
    kv_memory=2**20,
    kv_bytes_per_token=1_024,
    max_model_tokens=512,
    embed_batch_tokens=512,
)
CLASSES = {"classes": {"standard": {"priority": 1, "default": True}}}


PARTS = PartOrder({"rerank": 0.1, "answer": 0.9})


def reranking(name, deadline_ms=10_000.0, stated_ms=10_000.0):
    """Its part is a tenth of the deadline."""
    stage = WorkflowStage(name, "rerank", deadline_ms)
    return PlannedRequest(name, 0.0, Kind.EMBED, "standard", lengths=(512,), stage=stage, e2e_ms=stated_ms)


def sent(requests, order=None):
    """Outcome of each request if it was lost, and their order of completion; sent 10 ms apart."""
    answers, ended = [PartialResponse() for _ in requests], []

    async def send(target, number):
        await asyncio.sleep(0.01 * number)
        await target.send(requests[number], answers[number])
        ended.append(requests[number].id)

    async def run():
        async with simulated_target(DEVICE, CLASSES, has_gate=True) as target:
            with nullcontext(target) if order is None else ordered_by_parts(target, order) as told:
                await asyncio.gather(*(send(told, number) for number in range(len(requests))))

    virtual_time.run(run())
    return [answer.loss for answer in answers], ended


BOTH = pytest.mark.parametrize("order", [PARTS, replace(PARTS, is_worth_by_part=True)])


@BOTH
def test_a_call_that_misses_its_part_but_not_the_whole_is_served(order):
    assert sent([reranking(name, stated_ms=1_500.0) for name in "abc"])[0].count(Outcome.REJECTED) == 2
    losses, ended = sent([reranking(name) for name in "abc"], order)
    assert losses == [None] * 3 and ended == ["a", "b", "c"]


@BOTH
def test_calls_are_computed_in_the_order_of_their_parts(order):
    # Of what they state, the last call has the most left.
    calls = [reranking("a"), reranking("b", 40_000.0), reranking("c", 30_000.0, 20_000.0)]
    assert sent(calls, order)[1] == ["a", "c", "b"]
    assert sent(calls)[1] == ["a", "b", "c"]


def test_a_call_that_misses_what_it_states_is_refused():
    losses, _ = sent([reranking(name, stated_ms=1_500.0) for name in "ab"], PARTS)
    assert losses == [None, Outcome.REJECTED]


def test_a_call_is_worth_its_weight_from_its_part_until_the_whole():
    def values(part, whole, work=10):
        left = Duration(PartInstant.of(part, whole))
        return values_by_part([PendingWork(2.0, left, Duration(work))])[0]

    assert values(20, 40) == 1.0
    assert values(5, 40) == values(-5, 40) == 2.0
    assert values(-5, 9) == pytest.approx(0.02)
