"""A gate that reserves for the answers which admitted rerankings announce."""

import asyncio
from dataclasses import replace

import pytest

from benchmark_control_plane.experiments.gate.announced_answers import AnnouncingTarget, Reserve
from benchmark_control_plane.judge.records import PartialResponse
from benchmark_control_plane.judge.simulated_target import simulated_target
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from benchmark_control_plane.judge.workflow_stages import WorkflowStage
from benchmark_control_plane.judge.workload import PlannedRequest
from benchmark_control_plane.simulator import virtual_time
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind, Owner

# A reranking takes a second, a token 20 ms.
DEVICE = SimulatedDeviceSection(
    step=(0.02, 0.0, 0.0, 0.0),
    embedding=(1.0, 0.0),
    kv_memory=2**20,
    kv_bytes_per_token=1_024,
    max_model_tokens=512,
)
CLASSES = {"classes": {"standard": {"priority": 1, "default": True}}}
DEADLINE_MS = 4_000.0


def stage(name, deadline_ms=DEADLINE_MS):
    return WorkflowStage("w", name, deadline_ms, part=1.0)


RERANK = PlannedRequest("w-rerank", 0.0, Kind.EMBED, "standard", lengths=(16,), stage=stage("rerank"))
ANSWER = PlannedRequest("w-~answer", 0.0, Kind.GENERATE, "standard", prompt_tokens=160, output_tokens=32,
                        after="w-rerank", stage=stage("answer"))  # fmt: skip
OTHER = PlannedRequest("other", 0.0, Kind.GENERATE, "standard", prompt_tokens=16, output_tokens=200)


def played(reserve, play, *, rerank=RERANK, answer=ANSWER):
    async def run():
        async with simulated_target(DEVICE, CLASSES, has_gate=True) as target:
            announcing = AnnouncingTarget(target, [rerank, answer], reserve)
            dispatcher = target.service.gate.dispatcher
            found = await play(announcing, dispatcher)
            await announcing.settle()
            return found

    return virtual_time.run(run())


async def quotas(announcing, dispatcher, *, rerank=RERANK, answer=ANSWER):
    """The LLM's quota before, while the reranking is computed, after it, and after the answer."""
    found = [dispatcher.ledger.quota(Owner.LLM)]
    sending = asyncio.create_task(announcing.send(rerank, PartialResponse()))
    await asyncio.sleep(0.5)
    found.append(dispatcher.ledger.quota(Owner.LLM))
    await sending
    found.append(dispatcher.ledger.quota(Owner.LLM))
    await announcing.send(answer, PartialResponse())
    return [*found, dispatcher.ledger.quota(Owner.LLM)]


def test_the_memory_of_the_answer_is_held_back_from_the_admission_of_the_reranking():
    before, during, between, after = played(Reserve(memory=True), quotas)
    assert before == after == 2**20
    # 160 prompt tokens and 32 of output, in blocks of 16.
    assert before - during == before - between == (160 + 15 + 32) * 1_024


def test_nothing_is_held_back_for_an_answer_whose_deadline_has_passed():
    late = replace(RERANK, stage=stage("rerank", 900.0))

    async def after_reranking(announcing, dispatcher):
        await announcing.send(late, PartialResponse())
        return dispatcher.ledger.quota(Owner.LLM)

    assert played(Reserve(memory=True), after_reranking, rerank=late) == 2**20


@pytest.mark.parametrize(("reserve", "expected"), [(Reserve(), 0), (Reserve(time=True), 1)])
def test_an_announced_answer_counts_as_a_decoding_request(reserve, expected):
    async def added(announcing, dispatcher):
        other = asyncio.create_task(announcing.send(OTHER, PartialResponse()))
        await asyncio.sleep(1)
        now = dispatcher.snapshots.share(Owner.LLM, 0, 0).decode_load.sequences
        reranking = asyncio.create_task(announcing.send(RERANK, PartialResponse()))
        await asyncio.sleep(0.5)
        then = dispatcher.snapshots.share(Owner.LLM, 0, 0).decode_load.sequences
        await asyncio.gather(other, reranking)
        return then - now

    assert played(reserve, added) == expected


@pytest.mark.parametrize(("early", "outcome"), [((), None), (("rerank",), Outcome.REJECTED)])
def test_a_workflow_is_refused_where_its_answer_would_be(early, outcome):
    long = replace(ANSWER, output_tokens=340)

    async def sent(announcing, dispatcher):
        other = asyncio.create_task(announcing.send(OTHER, PartialResponse()))
        await asyncio.sleep(1)
        response = PartialResponse()
        await announcing.send(RERANK, response)
        await other
        return response.loss

    assert played(Reserve(early=early), sent, answer=long) is outcome
