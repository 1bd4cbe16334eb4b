"""The stream of tokens of one admitted request, across preemptions.

A preempted request resumes by recompute: its tokens so far become part of the prompt, and its client sees a
pause. Every path out (finish, error, cancellation, `aclose`) ends the request through the dispatcher once.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from controlplane.core.decision import Outcome
from controlplane.core.errors import Refused
from controlplane.core.generation import Delta, Handoff, Sampling
from controlplane.core.ports import Generator
from controlplane.service.gate.dispatcher import Dispatcher
from controlplane.service.request_jobs import GenerateJob
from controlplane.service.ticket import Ticket


class TokenStream:
    """Async iterator of Delta; the caller must exhaust it or call `aclose`.

    Raises Rejected if the request is evicted, BackendDown or BackendFailed if the engine fails.
    """

    def __init__(
        self, dispatcher: Dispatcher, generator: Generator, ticket: Ticket, job: GenerateJob
    ) -> None:
        self.ticket = ticket
        self._dispatcher = dispatcher
        self._generator = generator
        self._job = job
        self._tokens: list[int] = []
        """Output so far of a resumable request."""
        self._decoded = 0
        """Number of those tokens whose text has arrived."""
        self._repeated = 0
        """Tokens that a resumed engine generates again, so that they must not be counted."""
        self._lengths: dict[int, int] = {}
        """Output tokens by choice."""
        self._longest = 0
        self._is_resumed = False
        self._deltas: AsyncGenerator[Delta] | None = None
        ticket.is_resumable = is_resumable(job)

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> Delta:
        try:
            delta = await self._next()
        except StopAsyncIteration:
            self._dispatcher.end(self.ticket, None)
            raise
        except asyncio.CancelledError:
            await self.aclose()
            raise
        except Exception as error:
            self.ticket.raise_if_failed()
            self._dispatcher.end(self.ticket, outcome_of_error(error))
            raise
        self._count(delta)
        return delta

    def take(self, delta: Delta) -> None:
        """Counts a delta that the caller got from the generator itself; this stream then leaves it out."""
        self._count(self._keep_for_resume(delta))

    async def aclose(self) -> None:
        """Aborts the request if it has not ended: first in the engine, then its lease."""
        try:
            if self._deltas is not None:
                await self._deltas.aclose()
        finally:
            self._dispatcher.end(self.ticket, Outcome.ABORTED)

    async def _next(self) -> Delta:
        while True:
            if self._deltas is None:
                await self._dispatcher.wait_for_grant(self.ticket)
                if pending := self.ticket.pending_preemptions:
                    # `gather` would cancel them with this request: victims would run on without leases.
                    await asyncio.wait(pending)
                    self.ticket.pending_preemptions = ()
                    for preemption in pending:
                        preemption.result()
                    # The request may have been rejected while its victims left the engine.
                    continue
                self._deltas = self._start()
            delta = self._keep_for_resume(await anext(self._deltas))
            # An eviction does not stop a request in an engine that did not know it yet.
            if delta.finish_reason != "preempted" and self.ticket.outcome is None:
                return delta
            await self._deltas.aclose()
            self._deltas = None
            self.ticket.raise_if_failed()
            if delta.token_ids or delta.text or delta.reasoning:
                return replace(delta, finish_reason=None)

    def _start(self) -> AsyncGenerator[Delta]:
        job = self._job
        if not self._tokens:
            return self._generate(job.prompt, job.sampling)
        # Tokens at the end whose text is an incomplete character are generated again, since the engine
        # decodes text from the end of the prompt. They were counted before and must not be counted twice.
        self._repeated += len(self._tokens) - self._decoded
        self._is_resumed = True
        del self._tokens[self._decoded :]
        sampling = replace(job.sampling, max_tokens=job.sampling.max_tokens - len(self._tokens))
        return self._generate([*job.prompt, *self._tokens], sampling)

    def _generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta]:
        job, ticket, timeline = self._job, self.ticket, self.ticket.timeline
        handoff = Handoff(
            ticket.engine_rank,
            ticket.tenant_delay,
            ticket.forecast,
            len(self._tokens),
            timeline.first_token,
            timeline.last_token,
        )
        return self._generator.generate(job.request, prompt, sampling, job.chat, handoff=handoff)

    def _count(self, delta: Delta) -> None:
        """Counts steps: the sequences of one request grow in parallel, so the longest one counts."""
        length = self._lengths.get(delta.index, 0) + len(delta.token_ids)
        self._lengths[delta.index] = length
        steps = length - self._longest
        if not self._longest:
            self.ticket.cache_hit_tokens = delta.cached_tokens
        if steps > 0:
            self._longest = length
            self._dispatcher.count_tokens(self.ticket, steps)

    def _keep_for_resume(self, delta: Delta) -> Delta:
        """Keeps the tokens of a resumable request, and returns the delta without those that are repeated."""
        if not self.ticket.is_resumable:
            return delta
        if self._is_resumed and delta.cached_tokens:
            # Its prompt holds the output so far, so these are no cached tokens of the client's prompt.
            delta = replace(delta, cached_tokens=0)
        self._tokens += delta.token_ids
        if delta.text or delta.reasoning:
            self._decoded = len(self._tokens)
        if not self._repeated:
            return delta
        counted = delta.token_ids[self._repeated :]
        self._repeated -= len(delta.token_ids) - len(counted)
        return replace(delta, token_ids=counted)


def outcome_of_error(error: BaseException) -> Outcome:
    """The outcome of a request that ended by `error`; a refused parameter is the client's error."""
    match error:
        case asyncio.CancelledError() | Refused():
            return Outcome.ABORTED
    return Outcome.FAILED


def is_resumable(job: GenerateJob) -> bool:
    """Whether a resumed request gives the same output distribution as one that was not preempted.

    Penalties, stop strings, structured output, seeds and tool parsers depend on earlier output and would
    restart with the resumed request, so requests that use them are never preempted by the gate.
    """
    s = job.sampling
    if s.presence_penalty or s.frequency_penalty:
        return False
    neutral = Sampling(
        max_tokens=s.max_tokens, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p,
        presence_penalty=s.presence_penalty, frequency_penalty=s.frequency_penalty,
        logit_bias=s.logit_bias, stop_token_ids=s.stop_token_ids, ignore_eos=s.ignore_eos,
        skip_special_tokens=s.skip_special_tokens,
    )  # fmt: skip
    return s == neutral and not (job.chat and job.chat.tools)
