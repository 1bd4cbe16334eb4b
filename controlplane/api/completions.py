"""POST /v1/completions: text or token ids in, what follows them out. Several prompts run side by side."""

import time
from functools import partial

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from controlplane.api.answers import Tally, opened_answers
from controlplane.api.exchange import Ask, Reception, send_json, ticket_headers
from controlplane.api.logprobs import completion_logprobs
from controlplane.api.sampling import completion_sampling
from controlplane.api.stream import Envelope, send_stream
from controlplane.api.wire import CompletionRequest
from controlplane.core.ports import Delta, TokenLogprob
from controlplane.service.assembly import Service
from controlplane.service.intake import GenerateJob

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, when the caller states none."""


def completion_routes(service: Service, reception: Reception) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None)
    async def create_completion(request: Request) -> Response:
        ask = await reception.ask(request, CompletionRequest)
        return reception.exchange(partial(_answer, service, reception, ask))

    return routes


async def _answer(service: Service, reception: Reception, ask: Ask[CompletionRequest], send: Send) -> None:
    body = ask.body
    jobs = await _jobs(service, ask)
    tally = Tally(sum(job.request.prompt_tokens for job in jobs), n=jobs[0].sampling.n)
    answer_id, created = f"cmpl-{ask.request_id}", int(time.time())
    if not body.stream:
        await _send_whole(send, service, jobs, body, tally, answer_id=answer_id, created=created)
        return
    await send_stream(
        send,
        service.dispatcher,
        jobs,
        envelope=Envelope(
            answer_id=answer_id,
            kind="text_completion",
            created=created,
            model=body.model,
            has_usage=body.wants_usage_chunk,
        ),
        form=ChunkFormat(body),
        tally=tally,
        wants_usage=body.wants_usage_chunk,
        overload_status=reception.settings.overload_status,
    )


async def _jobs(service: Service, ask: Ask[CompletionRequest]) -> list[GenerateJob]:
    body = ask.body
    sampling = completion_sampling(body)
    return [
        await service.intake.completion(
            ask.request_id,
            ask.caller,
            body.model,
            prompt,
            max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS,
            sampling=sampling,
            hints=ask.hints,
        )
        for prompt in body.prompts
    ]


def _echoed(body: CompletionRequest, index: int) -> str:
    """The prompt's text before choice `index`, if it is wanted."""
    return str(body.prompts[index // (body.n or 1)]) if body.echo else ""


class ChunkFormat:
    """An echoed prompt comes with each choice's first delta."""

    def __init__(self, body: CompletionRequest) -> None:
        self._body = body
        self._shown: dict[int, int] = {}

    def choice(self, delta: Delta) -> dict[str, object] | None:
        shown = self._shown.get(delta.index)
        text = delta.text if shown is not None else _echoed(self._body, delta.index) + delta.text
        self._shown[delta.index] = (shown or 0) + len(text)
        has_logprobs = self._body.logprobs is not None
        return {
            "index": delta.index,
            "text": text,
            "logprobs": completion_logprobs(delta.logprobs, offset=shown or 0) if has_logprobs else None,
            "finish_reason": delta.finish_reason,
        }


class Choice:
    """One sample, gathered."""

    def __init__(self, prompt_text: str) -> None:
        self.text = [prompt_text]
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def shown(self, index: int, *, has_logprobs: bool) -> dict[str, object]:
        return {
            "index": index,
            "text": "".join(self.text),
            "logprobs": completion_logprobs(self.logprobs, offset=0) if has_logprobs else None,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }


async def _send_whole(
    send: Send,
    service: Service,
    jobs: list[GenerateJob],
    body: CompletionRequest,
    tally: Tally,
    *,
    answer_id: str,
    created: int,
) -> None:
    choices = [Choice(_echoed(body, index)) for index in range(len(jobs) * jobs[0].sampling.n)]
    async with opened_answers(service.dispatcher, jobs) as (tickets, deltas):
        async for delta in deltas:
            tally.count(delta)
            choices[delta.index].add(delta)
    has_logprobs = body.logprobs is not None
    reply = {
        "id": answer_id,
        "object": "text_completion",
        "created": created,
        "model": body.model,
        "choices": [choice.shown(index, has_logprobs=has_logprobs) for index, choice in enumerate(choices)],
        "usage": tally.usage(),
    }
    await send_json(send, orjson.dumps(reply), ticket_headers(tickets))
