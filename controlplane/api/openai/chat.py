"""POST /v1/chat/completions: a conversation in, the next message out, whole or as it is made."""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.routing import Route
from starlette.types import Send

from controlplane.api.endpoint import EndpointFactory, ParsedRequest
from controlplane.api.openai.logprobs import chat_logprobs
from controlplane.api.openai.responses import Choice, UsageCounter, send_whole
from controlplane.api.openai.sampling import chat_prompt, chat_sampling
from controlplane.api.openai.streaming import Envelope, ending, send_stream
from controlplane.api.protocol.requests import ChatCompletionRequest
from controlplane.core.generation import Delta
from controlplane.service.service import Service

ChatAsk = ParsedRequest[ChatCompletionRequest]


def chat_route(service: Service, reception: EndpointFactory) -> Route:
    return reception.route(
        "/v1/chat/completions", ChatCompletionRequest, partial(_answer, service, reception)
    )


async def _answer(service: Service, reception: EndpointFactory, ask: ChatAsk, send: Send) -> None:
    body = ask.body
    job = await service.intake.chat(
        ask.request_id,
        ask.caller,
        body.model,
        chat_prompt(body),
        max_tokens=body.most_tokens,
        sampling=chat_sampling(body),
        hints=ask.hints,
    )
    tally = UsageCounter(job.request.prompt_tokens, n=job.sampling.n)
    head = {
        "id": f"chatcmpl-{ask.request_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model,
    }
    if not body.stream:
        choices = [ChatChoice(body) for _ in range(job.sampling.n)]
        await send_whole(send, service.gate, [job], head=head, choices=choices, tally=tally)
        return
    await send_stream(
        send,
        service.gate,
        [job],
        envelope=Envelope(
            head | {"object": "chat.completion.chunk"},
            has_usage=body.wants_usage_chunk,
            has_running_usage=body.wants_running_usage,
        ),
        form=ChatChunkFormat(body),
        tally=tally,
        overload_status=reception.settings.overload_status,
    )


class ChatChunkFormat:
    """The role comes with each choice's first delta."""

    def __init__(self, body: ChatCompletionRequest) -> None:
        self._has_logprobs = bool(body.logprobs)
        self._is_single_call = body.parallel_tool_calls is False
        self._hides_reasoning = body.include_reasoning is False
        self._begun: set[int] = set()

    def choice(self, delta: Delta) -> dict[str, object] | None:
        if self._hides_reasoning:
            delta = _without_reasoning(delta)
        said: dict[str, object] = {}
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            said["role"] = "assistant"
        if delta.tool_calls:
            said["tool_calls"] = _kept_calls(delta, is_single=self._is_single_call)
        if delta.reasoning:
            said["reasoning"] = delta.reasoning
        if delta.text or not (delta.tool_calls or delta.reasoning):
            said["content"] = delta.text
        return {
            "index": delta.index,
            "delta": said,
            "logprobs": chat_logprobs(delta.logprobs) if self._has_logprobs else None,
            **ending(delta),
        }


def _kept_calls(delta: Delta, *, is_single: bool) -> list[Mapping[str, Any]]:
    return [call for call in delta.tool_calls if not is_single or call["index"] == 0]


def _without_reasoning(delta: Delta) -> Delta:
    """Its tokens' probabilities would tell it, too."""
    return replace(delta, reasoning="", logprobs=()) if delta.reasoning else delta


class ChatChoice(Choice):
    """Its text is null where there are only tool calls or thoughts."""

    def __init__(self, body: ChatCompletionRequest) -> None:
        super().__init__()
        self._has_logprobs = bool(body.logprobs)
        self._is_single_call = body.parallel_tool_calls is False
        self._hides_reasoning = body.include_reasoning is False
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, delta: Delta) -> None:
        if self._hides_reasoning:
            delta = _without_reasoning(delta)
        super().add(delta)
        self._reasoning.append(delta.reasoning)
        for part in _kept_calls(delta, is_single=self._is_single_call):
            self._add_call(part)

    def _add_call(self, part: Mapping[str, Any]) -> None:
        call = self._calls.setdefault(part["index"], {"type": "function", "function": {"arguments": ""}})
        call.update({key: part[key] for key in ("id", "type") if part.get(key)})
        function = part.get("function") or {}
        if function.get("name"):
            call["function"]["name"] = function["name"]
        call["function"]["arguments"] += function.get("arguments") or ""

    def fields(self) -> dict[str, object]:
        calls = [self._calls[at] for at in sorted(self._calls)]
        text, reasoning = "".join(self.text), "".join(self._reasoning)
        empty = None if calls or reasoning else ""
        message: dict[str, object] = {"role": "assistant", "content": text or empty, "refusal": None}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "message": message,
            "logprobs": chat_logprobs(self.logprobs) if self._has_logprobs else None,
        }
