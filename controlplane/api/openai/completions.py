"""POST /v1/completions for text or token-id prompts; several prompts run concurrently."""

import time
from functools import partial

from starlette.routing import Route
from starlette.types import Send

from controlplane.api.openai.buffered import Choice, UsageCounter, send_whole
from controlplane.api.openai.logprobs import completion_logprobs
from controlplane.api.openai.sampling import completion_sampling
from controlplane.api.openai.streaming import ChunkEncoder, Envelope, ending, send_stream
from controlplane.api.post_endpoint import EndpointFactory, ParsedRequest
from controlplane.api.protocol.requests import CompletionRequest
from controlplane.core.generation import Delta
from controlplane.service.request_jobs import GenerateJob
from controlplane.service.service import Service

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


def completion_route(service: Service, endpoints: EndpointFactory) -> Route:
    """The route of text completions."""
    return endpoints.route("/v1/completions", CompletionRequest, partial(_serve, service, endpoints))


async def _serve(
    service: Service, endpoints: EndpointFactory, ask: ParsedRequest[CompletionRequest], send: Send
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
    envelope = Envelope(head, has_usage=body.wants_usage_chunk, has_running_usage=body.wants_running_usage)
    await send_stream(
        send,
        service.gate,
        jobs,
        encoder=ChunkEncoder(envelope, CompletionChunkFormat(body), tally),
        tally=tally,
        overload_status=ask.settings.overload_status,
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
            arrival=ask.arrival,
            prompts=len(body.prompts),
        )
        for prompt in body.prompts
    ]


def _echoed(body: CompletionRequest, index: int) -> str:
    """The prompt that precedes choice `index` with `echo: true`, otherwise an empty string."""
    return str(body.prompts[index // (body.n or 1)]) if body.echo else ""


class CompletionChunkFormat:
    """Turns deltas into the choices of `text_completion` chunks.

    The first chunk of each choice carries the echoed prompt.
    """

    def __init__(self, body: CompletionRequest) -> None:
        self._body = body
        self._offsets: dict[int, int] = {}

    def choice(self, delta: Delta) -> dict[str, object] | None:
        """Returns the chunk's choice for `delta`."""
        text = delta.text if delta.index in self._offsets else _echoed(self._body, delta.index) + delta.text
        # Counted from tokens, as in a buffered response: the text may lag behind them while a character or a
        # stop string is incomplete.
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
    """Collects one choice of a buffered text completion, which begins with the echoed prompt."""

    def __init__(self, body: CompletionRequest, index: int) -> None:
        super().__init__(_echoed(body, index))
        self._has_logprobs = body.logprobs is not None

    def fields(self) -> dict[str, object]:
        """The text and its logprobs."""
        return {
            "text": "".join(self.text),
            "logprobs": completion_logprobs(self.logprobs, offset=0) if self._has_logprobs else None,
        }
