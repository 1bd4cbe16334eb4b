"""Two models of different speed, rerankers or not: a call is decided by the rate of its own model."""

import asyncio

import pytest

from backends.testing.scripted import ScriptedEmbedder
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.config import parse
from controlplane.core.decision import Reason
from controlplane.service.bootstrap import build_service
from controlplane.service.request_jobs import Caller, RequestHints, RequestOrigin, TextPairs
from controlplane.service.runtime.timers import LoopClock
from controlplane.service.service import Service
from controlplane.service.ticket import Rejected

CLASSES = {"documents": {"e2e_ms": 300, "default": True}}


async def refusal(service: Service, model: str, tokens: int, **hints: float) -> Reason | None:
    """The reason of its rejection; None if it was served."""
    origin = RequestOrigin("e", Caller("t"), RequestHints(**hints))
    if model in service.encoders.rerankers:
        pairs = TextPairs(["q"], ["x" * (tokens - 1)])
        job = await service.intake.pairs.job(origin, model, pairs, None)
    else:
        job = await service.intake.embeddings(origin, model, ["x" * tokens])
    try:
        await service.gate.embed(job)
    except Rejected as error:
        return error.reject.reason
    return None


async def both_used(service: Service) -> None:
    """Enough calls for the rates measured at the start to lose their weight."""
    for _ in range(40):
        for model in ("quick", "slow"):
            assert await refusal(service, model, 100, e2e_ms=60_000) is None


def play(scenario, reranker: str | None) -> list[Reason | None]:
    """A token takes 0.1 ms in the fast model and 2.5 ms in the slow one; one of them may be a reranker."""

    async def main():
        speeds = {"quick": 0.0001, "slow": 0.0025}
        workers = {
            name: ScriptedEmbedder(
                model=name, token_seconds=each, max_running=1, dimension=2 if name == reranker else 8
            )
            for name, each in speeds.items()
        }
        rerankers = [workers.pop(reranker)] if reranker else []
        content = {
            "models": {
                "embeddings": [{"model": name} for name in workers],
                "rerankers": [{"model": each.model} for each in rerankers],
            },
            "classes": CLASSES,
        }
        workspace = sum(worker.workspace_bytes for worker in (*workers.values(), *rerankers))
        service = build_service(
            parse(content), [], [*workers.values()], rerankers=rerankers, workspace_bytes=2 * workspace,
            clock=LoopClock(),
        )  # fmt: skip
        await service.start()
        await both_used(service)
        found = await scenario(service)
        await service.stop()
        return found

    return run(main())


with_a_reranker = pytest.mark.parametrize("reranker", [None, "quick", "slow"])


@with_a_reranker
def test_calls_of_a_fast_model_are_not_rejected_for_the_slowness_of_another(reranker):
    async def scenario(service):
        return await asyncio.gather(*(refusal(service, "quick", 100) for _ in range(10)))

    assert play(scenario, reranker) == [None] * 10


@with_a_reranker
def test_calls_of_a_slow_model_are_not_admitted_for_the_speed_of_another(reranker):
    async def scenario(service):
        return await asyncio.gather(*(refusal(service, "slow", 100) for _ in range(3)))

    assert sorted(map(str, play(scenario, reranker))) == ["None", "slo_unattainable", "slo_unattainable"]
