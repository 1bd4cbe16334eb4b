"""Tokenizes texts and has grammars checked before admission; costly work is charged and done in turn."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from controlplane.core.ports import Generator
from controlplane.core.text_limits import LONG_TEXT_CHARACTERS
from controlplane.service.fair_slots import FairSlots
from controlplane.service.request_jobs import EmbedJob, GenerateJob

Tokens = TypeVar("Tokens")


class PromptTokenizer:
    """Tokenizes short texts at once, and long ones after their tenant was charged, in slots taken in turn.

    `charge` charges a job to its tenant's rate limits; it raises Rejected. `slots` bound what runs at once.
    """

    def __init__(self, threads: int, charge: Callable[[GenerateJob | EmbedJob], None]) -> None:
        self._charge = charge
        self.slots = FairSlots(threads)

    async def tokenize(
        self,
        characters: int,
        work: Callable[[], Awaitable[Tokens]],
        job_to_charge: Callable[[], GenerateJob | EmbedJob],
    ) -> tuple[Tokens, int | None]:
        """Runs `work`, which tokenizes so many characters; returns its tokens, and the tokens charged before.

        For a long text the job that `job_to_charge` returns, of the fewest tokens possible, is charged; for a
        short one nothing (None). Raises Refused, Rejected.
        """
        if characters <= LONG_TEXT_CHARACTERS:
            return await work(), None
        job = job_to_charge()
        self._charge(job)
        found = await self.slots.run(job.request.tenant, work)
        return found, job.request.prompt_tokens

    async def in_turn(self, tenant: str, characters: int, work: Callable[[], Awaitable[Tokens]]) -> Tokens:
        """Runs `work` on so many characters without charging the tenant, and returns its result."""
        return await work() if characters <= LONG_TEXT_CHARACTERS else await self.slots.run(tenant, work)


class GrammarChecks:
    """Has grammars checked by their engine before admission; costly checks are charged, and run in turn.

    `charge` charges a job to its tenant's rate limits; it raises Rejected.
    """

    def __init__(self, processes: int, charge: Callable[[GenerateJob | EmbedJob], None]) -> None:
        self._charge = charge
        self.slots = FairSlots(processes)

    async def checked(self, job: GenerateJob, generator: Generator) -> GenerateJob:
        """The job, with the tokens that were charged. Raises Refused, Rejected or BackendFailed."""
        charged, tenant = job.charged_tokens, job.request.tenant

        async def in_turn(work: Callable[[], Awaitable[None]]) -> None:
            nonlocal charged
            if charged is None:
                self._charge(job)
                charged = job.request.prompt_tokens
            await self.slots.run(tenant, work)

        await generator.check_grammar(job.sampling, job.chat, tenant=tenant, in_turn=in_turn)
        return replace(job, charged_tokens=charged)
