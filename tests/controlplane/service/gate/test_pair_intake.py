"""Rerank requests are embed work: one lease, one deadline and one charge for all documents."""

import asyncio
from collections.abc import Callable

import pytest

from backends.cost_models.step_time import embedding_line
from backends.simulated.embedder import SimulatedEmbedder
from backends.simulated.shared_device import SimulatedDevice
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.config import parse
from controlplane.core.clock import seconds
from controlplane.core.decision import Outcome, Reason
from controlplane.core.request import Kind
from controlplane.service.bootstrap import build_service
from controlplane.service.gate.gate import Embedded
from controlplane.service.request_jobs import MODEL_LIMIT, Caller, RequestHints, RequestOrigin, TextPairs
from controlplane.service.runtime.timers import LoopClock
from controlplane.service.service import Service
from controlplane.service.ticket import Rejected

CLASSES = {"retrieval": {"e2e_ms": 10_000, "default": True}}


async def rank(service: Service, documents: list[str], *, tenant: str = "t", **hints: float) -> Embedded:
    pairs = TextPairs(["query"], documents)
    origin = RequestOrigin("r", Caller(tenant), RequestHints(**hints))
    job = await service.intake.pairs.job(origin, None, pairs, MODEL_LIMIT)
    return await service.gate.embed(job)


def play(scenario, *, room: Callable[[], int] | None = None, **sections):
    """An embedding model and a reranker share a device: a pass takes 10 ms for each padded token.

    `room` returns the bytes, one per padded token, that the device has for a pass of the reranker.
    """

    async def main():
        device = SimulatedDevice(embedding_line(0, 0.01))
        size = {"max_input_tokens": 32, "batch_tokens": 64, "bytes_per_token": 1}
        embedder = SimulatedEmbedder(device, model="vectors", **size)
        reranker = SimulatedEmbedder(device, model="scores", dimension=2, room=room, **size)
        models = {"embeddings": [{"model": "vectors"}], "rerankers": [{"model": "scores"}]}
        service = build_service(
            parse({"models": models, "classes": CLASSES, **sections}),
            [],
            [embedder],
            rerankers=[reranker],
            workspace_bytes=128,
            clock=LoopClock(),
        )
        await service.start()
        try:
            return await scenario(service)
        finally:
            await service.stop()
            assert service.gate.tickets() == ()

    return run(main())


def test_a_rerank_request_is_one_embed_request_with_one_lease():
    async def scenario(service):
        asking = asyncio.create_task(rank(service, ["d" * 5] * 10))
        await asyncio.sleep(0.001)
        (ticket,) = service.gate.tickets()
        assert (ticket.request.kind, ticket.request.model) == (Kind.EMBED, "scores")
        assert (ticket.request.sequences, ticket.request.prompt_tokens) == (10, 100)
        assert ticket.lease is not None
        found = await asking
        assert found.vectors.shape == (10, 2)
        assert found.ticket.outcome is Outcome.MET
        assert seconds(0.9) < found.ticket.timeline.e2e < seconds(1.1)

    play(scenario)


def test_a_deadline_holds_for_all_documents_together():
    async def scenario(service):
        late = await rank(service, ["d" * 5] * 10, e2e_ms=500)
        assert late.ticket.outcome is Outcome.LATE
        met = await rank(service, ["d" * 5] * 10, e2e_ms=1_100)
        assert met.ticket.outcome is Outcome.MET

    play(scenario)


def test_all_tokens_of_the_pairs_are_charged_to_the_tenant():
    tenants = {"t": {"api_keys_sha256": ["0" * 64], "tokens_per_minute": 150}}

    async def scenario(service):
        await rank(service, ["d" * 5] * 10)
        with pytest.raises(Rejected) as rejected:
            await rank(service, ["d" * 5] * 10)
        assert rejected.value.reject.reason is Reason.RATE_LIMITED

    play(scenario, tenants=tenants)


def test_a_client_that_leaves_frees_the_lease():
    async def scenario(service):
        asking = asyncio.create_task(rank(service, ["d" * 5] * 10))
        await asyncio.sleep(0.2)
        (ticket,) = service.gate.tickets()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (ticket.outcome, service.gate.tickets()) == (Outcome.ABORTED, ())

    play(scenario)


def test_passes_out_of_memory_are_repeated_in_smaller_ones():
    async def scenario(service):
        found = await rank(service, ["d" * 5] * 10)
        assert found.vectors.shape == (10, 2)
        assert found.ticket.outcome is Outcome.MET
        # Passes of 6 pairs (60 tokens), then of 3.
        assert service.encoders["scores"].out_of_memory == 1
        assert b"tandem_embedding_out_of_memory_total 1.0" in service.metrics_text()

    play(scenario, room=lambda: 30)
