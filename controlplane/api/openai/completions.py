"""POST /v1/completions: text or token ids in, what follows them out. Several prompts run side by side."""

import time
from functools import partial

from starlette.routing import Route
from starlette.types import Send

from controlplane.api.endpoint import EndpointFactory, ParsedRequest
from controlplane.api.openai.logprobs import completion_logprobs
from controlplane.api.openai.responses import Choice, UsageCounter, send_whole
from controlplane.api.openai.sampling import completion_sampling
from controlplane.api.openai.streaming import Envelope, ending, send_stream
from controlplane.api.protocol.requests import CompletionRequest
from controlplane.core.generation import Delta
from controlplane.service.jobs import GenerateJob
from controlplane.service.service import Service

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, when the caller states none."""


def completion_route(service: Service, reception: EndpointFactory) -> Route:
    return reception.route("/v1/completions", CompletionRequest, partial(_answer, service, reception))


async def _answer(
    service: Service, reception: EndpointFactory, ask: ParsedRequest[CompletionRequest], send: Send
) -> None:
    body = ask.body
    jobs = await _jobs(service, ask)
    tally = UsageCounter(sum(job.request.prompt_tokens for job in jobs), n=jobs[0].sampling.n)
    head = {
        "id": f"cmpl-{ask.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
    }
    if not body.stream:
        choices = [CompletionChoice(body, index) for index in range(len(jobs) * jobs[0].sampling.n)]
        await send_whole(send, service.gate, jobs, head=head, choices=choices, tally=tally)
        return
    await send_stream(
        send,
        service.gate,
        jobs,
        envelope=Envelope(head, has_usage=body.wants_usage_chunk, has_running_usage=body.wants_running_usage),
        form=CompletionChunkFormat(body),
        tally=tally,
        overload_status=reception.settings.overload_status,
    )


async def _jobs(service: Service, ask: ParsedRequest[CompletionRequest]) -> list[GenerateJob]:
    body = ask.body
    sampling = completion_sampling(body)
    return [
        await service.intake.completion(
            ask.request_id,
            ask.caller,
            body.model,
            prompt,
            max_tokens=body.most_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            sampling=sampling,
            hints=ask.hints,
        )
        for prompt in body.prompts
    ]


def _echoed(body: CompletionRequest, index: int) -> str:
    """The prompt's text before choice `index`, if it is wanted."""
    return str(body.prompts[index // (body.n or 1)]) if body.echo else ""


class CompletionChunkFormat:
    """An echoed prompt comes with each choice's first delta."""

    def __init__(self, body: CompletionRequest) -> None:
        self._body = body
        self._offsets: dict[int, int] = {}

    def choice(self, delta: Delta) -> dict[str, object] | None:
        text = delta.text if delta.index in self._offsets else _echoed(self._body, delta.index) + delta.text
        # Of the tokens, as in an answer sent whole: text may be held back, for the rest of a character or of
        # a stop string.
        offset = self._offsets.get(delta.index, 0)
        self._offsets[delta.index] = offset + sum(len(token.token) for token in delta.logprobs)
        has_logprobs = self._body.logprobs is not None
        return {
            "index": delta.index,
            "text": text,
            "logprobs": completion_logprobs(delta.logprobs, offset=offset) if has_logprobs else None,
            **ending(delta),
        }


class CompletionChoice(Choice):
    """An echoed prompt stands before it."""

    def __init__(self, body: CompletionRequest, index: int) -> None:
        super().__init__(_echoed(body, index))
        self._has_logprobs = body.logprobs is not None

    def fields(self) -> dict[str, object]:
        return {
            "text": "".join(self.text),
            "logprobs": completion_logprobs(self.logprobs, offset=0) if self._has_logprobs else None,
        }
