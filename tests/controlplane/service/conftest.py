from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.config import parse
from controlplane.core.generation import Sampling
from controlplane.core.request import Owner
from controlplane.service.bootstrap import build_service
from controlplane.service.gate.token_stream import TokenStream
from controlplane.service.request_jobs import Caller, GenerateJob, RequestHints
from controlplane.service.runtime.timers import LoopClock
from controlplane.service.service import Service
from controlplane.service.ticket import Ticket

CLASSES = {
    "interactive": {"priority": 5, "ttft_ms": 1000},
    "standard": {"priority": 1, "default": True, "sheddable": False},
    "batch": {"priority": 0, "sheddable": False},
}


@dataclass
class Bench:
    """A service on scripted engines; `ended` collects every ticket that was closed."""

    service: Service
    generator: ScriptedGenerator
    embedder: ScriptedEmbedder
    ended: list[Ticket] = field(default_factory=list)

    async def job(self, prompt: str = "hello", *, max_tokens: int = 4, **hints: object) -> GenerateJob:
        return await self.service.intake.completion(
            "test", Caller("tests"), self.generator.model, prompt,
            max_tokens=max_tokens, sampling=Sampling(max_tokens=max_tokens), hints=RequestHints(**hints),
        )  # fmt: skip

    async def ask(self, prompt: str = "hello", *, max_tokens: int = 4, **hints: object) -> TokenStream:
        return await self.service.gate.generate(await self.job(prompt, max_tokens=max_tokens, **hints))

    def assert_nothing_is_held(self) -> None:
        dispatcher = self.service.gate.dispatcher
        dispatcher.ledger.check_integrity()
        for owner in Owner:
            assert dispatcher.ledger.held(owner) == 0
            assert dispatcher.ledger.count(owner) == 0
            assert len(dispatcher.queued(owner)) == 0
        assert dispatcher.tickets() == ()

    @property
    def outcomes(self) -> list[str]:
        return [str(ticket.outcome) for ticket in self.ended]


@pytest.fixture
def bench() -> Callable[..., None]:
    """Runs `scenario(bench)` on virtual time, then checks that nothing is held."""

    def play(scenario, *, generator=None, embedder=None, **sections: object) -> Bench:
        async def main() -> Bench:
            llm = generator or ScriptedGenerator(prefill_seconds=0.1, token_seconds=0.05)
            vectors = embedder or ScriptedEmbedder(call_seconds=0.1)
            content = {"models": {"chat": {"model": "scripted"}}, "classes": CLASSES, **sections}
            service = build_service(
                parse(content), [llm], [vectors],
                workspace_bytes=2 * vectors.workspace_bytes, clock=LoopClock(),
            )  # fmt: skip
            await service.start()
            one = Bench(service, llm, vectors)
            _remember_ends(one)
            await scenario(one)
            one.assert_nothing_is_held()
            await service.stop()
            return one

        return run(main())

    return play


def _remember_ends(one: Bench) -> None:
    accounting = one.service.gate.dispatcher.accounting
    end = accounting.end

    def remembering(ticket, now, outcome):
        end(ticket, now, outcome)
        one.ended.append(ticket)

    accounting.end = remembering  # type: ignore[method-assign]
