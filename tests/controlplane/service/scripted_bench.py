"""A service on scripted engines whose ended tickets are collected."""

from dataclasses import dataclass, field

from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from controlplane.core.generation import Sampling
from controlplane.core.request import Owner
from controlplane.service.gate.gate import Embedded
from controlplane.service.gate.token_stream import TokenStream
from controlplane.service.request_jobs import Caller, GenerateJob, RequestHints, RequestOrigin
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
            RequestOrigin("test", Caller("tests"), RequestHints(**hints)), self.generator.model, prompt,
            max_tokens=max_tokens, sampling=Sampling(max_tokens=max_tokens),
        )  # fmt: skip

    async def ask(self, prompt: str = "hello", *, max_tokens: int = 4, **hints: object) -> TokenStream:
        return await self.service.gate.generate(await self.job(prompt, max_tokens=max_tokens, **hints))

    async def embed(self, *texts: str, name: str = "e", **hints: object) -> Embedded:
        origin = RequestOrigin(name, Caller("tests"), RequestHints(**hints))
        job = await self.service.intake.embeddings(origin, self.embedder.model, texts)
        return await self.service.gate.embed(job)

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


async def read(answer: TokenStream) -> str:
    """The whole text of an answer."""
    return "".join([delta.text async for delta in answer])
