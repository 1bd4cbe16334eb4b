"""POST /v1/completions for text or token-id prompts; several prompts run concurrently."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from starlette.routing import Route
from starlette.types import Send

from controlplane.api.error_dialects import renamed_fields
from controlplane.api.openai.buffered import Choice, UsageCounter, send_whole
from controlplane.api.openai.logprobs import CompletionLogprobs
from controlplane.api.openai.sampling import completion_sampling
from controlplane.api.openai.streaming import ChunkEncoder, Envelope, ending, send_stream
from controlplane.api.post_endpoint import EndpointFactory, ParsedRequest
from controlplane.api.protocol.requests import CompletionRequest
from controlplane.core.generation import Delta, TokenLogprob
from controlplane.service.request_jobs import GenerateJob
from controlplane.service.service import Service

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default; as in vLLM, null means it too."""


def completion_route(service: Service, endpoints: EndpointFactory) -> Route:
    """The route of text completions."""
    return endpoints.route("/v1/completions", CompletionRequest, partial(_serve, service))


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The prompt that precedes each of its choices with `echo: true`; both texts are empty without.

    `first_token` is the text of its first token, which has no log probability.
    """

    text: str = ""
    first_token: str = ""


async def _serve(service: Service, request: ParsedRequest[CompletionRequest], send: Send) -> None:
    body = request.body
    jobs = await _jobs(service, request)
    echoes = await _echoes(service, request, jobs)
    n, prompt_tokens = jobs[0].sampling.n, sum(job.request.prompt_tokens for job in jobs)
    counter = UsageCounter(prompt_tokens, n=n, has_output=body.stated_max_tokens != 0)
    head = {
        "id": f"cmpl-{request.origin.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
    }
    if not body.stream:
        choices = [CompletionChoice(body, echo) for echo in echoes for _ in range(n)]
        await send_whole(send, service.gate, jobs, head=head, choices=choices, counter=counter)
        return
    envelope = Envelope(head, has_usage=body.wants_usage_chunk, has_running_usage=body.wants_running_usage)
    await send_stream(
        send,
        service.gate,
        jobs,
        encoder=ChunkEncoder(envelope, CompletionChunkFormat(body, echoes).choice, counter),
        overload_status=request.settings.overload_status,
    )


async def _jobs(service: Service, request: ParsedRequest[CompletionRequest]) -> list[GenerateJob]:
    body = request.body
    sampling = completion_sampling(body, request.settings.limits)
    characters = sum(len(prompt) for prompt in body.prompts if isinstance(prompt, str))
    jobs = []
    for prompt in body.prompts:
        job = await service.intake.completion(
            request.origin,
            body.model,
            prompt,
            # Engines compute a prompt for a token after it, which is then left out.
            max_tokens=None if body.stated_max_tokens is None else max(1, body.stated_max_tokens),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            sampling=sampling,
            prompts=len(body.prompts),
            characters=characters,
        )
        jobs.append(job)
        # Many short prompts take as long as a long one.
        await asyncio.sleep(0)
    request.memory.hold_tokens(sum(job.request.prompt_tokens for job in jobs))
    return jobs


async def _echoes(
    service: Service, request: ParsedRequest[CompletionRequest], jobs: Sequence[GenerateJob]
) -> list[EchoedPrompt]:
    """What precedes the choices of each prompt."""
    body = request.body
    if not body.echo:
        return [EchoedPrompt()] * len(jobs)
    echoes = []
    with renamed_fields({"tokens": "prompt"}):
        for prompt, job in zip(body.prompts, jobs, strict=True):
            decoded = partial(service.intake.tokenization.decoded, request.origin.caller, body.model)
            text = prompt if isinstance(prompt, str) else await decoded(prompt)
            echoes.append(EchoedPrompt(text, await decoded(list(job.prompt[:1]))))
            await asyncio.sleep(0)
    return echoes


def _shown(body: CompletionRequest, delta: Delta) -> Delta:
    """The part of `delta` that the client asked for: with `max_tokens: 0` no output."""
    return delta if body.stated_max_tokens != 0 else replace(delta, text="", token_ids=(), logprobs=())


def _prompt_tokens(delta: Delta) -> tuple[TokenLogprob, ...]:
    """The tokens of an echoed prompt from the second on; empty after the first delta."""
    return tuple(token for token in delta.prompt_logprobs if token is not None)


class CompletionChunkFormat:
    """Turns deltas into the choices of `text_completion` chunks.

    The first chunk of each choice carries the echoed prompt; `echoes` has one for each prompt.
    """

    def __init__(self, body: CompletionRequest, echoes: Sequence[EchoedPrompt]) -> None:
        self._body = body
        self._echoes = echoes
        self._offsets: dict[int, int] = {}

    def choice(self, delta: Delta) -> dict[str, object]:
        """Returns the chunk's choice for `delta`."""
        body, delta = self._body, _shown(self._body, delta)
        echo = EchoedPrompt()
        if (offset := self._offsets.get(delta.index)) is None:
            offset, echo = 0, self._echoes[delta.index // (body.n or 1)]
        shown = None
        if body.logprobs is not None:
            first = echo.first_token if delta.prompt_logprobs else None
            logprobs = CompletionLogprobs(offset=offset, first=first)
            logprobs.add((*_prompt_tokens(delta), *delta.logprobs))
            # Counted from tokens, as in a buffered response: the text may lag behind them while a character
            # or a stop string is incomplete.
            shown, offset = logprobs.to_json(), logprobs.end
        self._offsets[delta.index] = offset
        return {
            "index": delta.index,
            "text": echo.text + delta.text,
            "logprobs": shown,
            **ending(delta),
        }


class CompletionChoice(Choice):
    """Collects one choice of a buffered text completion, which begins with the echoed prompt."""

    def __init__(self, body: CompletionRequest, echo: EchoedPrompt) -> None:
        super().__init__(echo.text)
        self._body = body
        self._logprobs = CompletionLogprobs(first=echo.first_token if body.echo else None)

    def add(self, delta: Delta) -> None:
        """Appends `delta`, the first one with the log probabilities of the prompt."""
        shown = _shown(self._body, delta)
        if self._body.logprobs is not None:
            self._logprobs.add((*_prompt_tokens(delta), *shown.logprobs))
        super().add(shown)

    def fields(self) -> dict[str, object]:
        """The text and its logprobs."""
        has_logprobs = self._body.logprobs is not None
        return {
            "text": "".join(self.text),
            "logprobs": self._logprobs.to_json() if has_logprobs else None,
        }
