"""POST /v1/chat/completions, buffered or streamed."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson
from starlette.routing import Route
from starlette.types import Send

from controlplane.api.openai.buffered import Choice, UsageCounter, send_whole
from controlplane.api.openai.logprobs import chat_entries
from controlplane.api.openai.sampling import chat_prompt, chat_sampling
from controlplane.api.openai.streaming import ChunkEncoder, Envelope, ending, send_stream
from controlplane.api.post_endpoint import EndpointFactory, ParsedRequest
from controlplane.api.protocol.requests import ChatCompletionRequest
from controlplane.core.generation import Delta, TokenLogprob
from controlplane.service.request_jobs import GenerateJob
from controlplane.service.service import Service

ParsedChat = ParsedRequest[ChatCompletionRequest]


def chat_route(service: Service, endpoints: EndpointFactory) -> Route:
    """The route of chat completions."""
    return endpoints.route("/v1/chat/completions", ChatCompletionRequest, partial(_serve, service))


async def _serve(service: Service, request: ParsedChat, send: Send) -> None:
    body = request.body
    job = await chat_job(service, request, body)
    model = service.config.models.chat
    counter = UsageCounter(
        job.request.prompt_tokens,
        n=job.sampling.n,
        has_reasoning=model is not None and model.reasoning_parser is not None,
    )
    head = {
        "id": f"chatcmpl-{request.origin.request_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model,
    }
    shown = ShownParts.of(body)
    if not body.stream:
        choices = [ChatChoice(shown) for _ in range(job.sampling.n)]
        await send_whole(send, service.gate, [job], head=head, choices=choices, counter=counter)
        return
    envelope = Envelope(
        head | {"object": "chat.completion.chunk"},
        has_usage=body.wants_usage_chunk,
        has_running_usage=body.wants_running_usage,
    )
    await send_stream(
        send,
        service.gate,
        [job],
        encoder=ChunkEncoder(envelope, ChatChunkFormat(shown).choice, counter),
        overload_status=request.settings.overload_status,
    )


async def chat_job(service: Service, request: ParsedRequest[Any], chat: ChatCompletionRequest) -> GenerateJob:
    """The job of `chat`, the request's body or what that maps onto. Raises Problem, Refused, Rejected."""
    job = await service.intake.chat(
        request.origin,
        chat.model,
        chat_prompt(chat),
        max_tokens=chat.stated_max_tokens,
        sampling=chat_sampling(chat, request.settings.limits),
    )
    request.memory.hold_tokens(job.request.prompt_tokens)
    return job


@dataclass(frozen=True, slots=True)
class ShownParts:
    """Selects which parts of the model's output the response contains."""

    has_logprobs: bool
    is_single_call: bool
    hides_reasoning: bool

    @classmethod
    def of(cls, body: ChatCompletionRequest) -> "ShownParts":
        """Parts of the response that the request selects."""
        return cls(
            has_logprobs=bool(body.logprobs),
            is_single_call=body.parallel_tool_calls is False,
            hides_reasoning=body.include_reasoning is False,
        )

    def calls(self, delta: Delta) -> list[Mapping[str, Any]]:
        """The tool calls of `delta`; only the first call of the message with `parallel_tool_calls: false`."""
        return [call for call in delta.tool_calls if not self.is_single_call or call["index"] == 0]

    def logprobs(self, entries: list[orjson.Fragment]) -> dict[str, object] | None:
        """The `logprobs` object, or None if the request does not ask for it."""
        return {"content": entries, "refusal": None} if self.has_logprobs else None


class HiddenReasoning:
    """Removes the reasoning of an answer and the log probabilities of its tokens, if the request excludes it.

    A parser keeps the text of a token back while it may be the beginning of the reasoning's end. Log
    probabilities without a text are therefore kept back, too, until a text, a call or more reasoning follows.
    """

    def __init__(self, shown: ShownParts) -> None:
        self._is_shown = not shown.hides_reasoning
        # Log probabilities by choice, of choices whose text or calls have not begun.
        self._held: dict[int, tuple[TokenLogprob, ...]] = {}
        self._begun: set[int] = set()

    def removed(self, delta: Delta) -> Delta:
        """Returns `delta` without what belongs to the reasoning."""
        if self._is_shown:
            return delta
        held, has_output = self._held.pop(delta.index, ()), bool(delta.text or delta.tool_calls)
        if has_output:
            self._begun.add(delta.index)
        if delta.reasoning:
            return replace(delta, reasoning="", logprobs=())
        if delta.index in self._begun:
            return replace(delta, logprobs=held + delta.logprobs) if held else delta
        self._held[delta.index] = held + delta.logprobs
        return replace(delta, logprobs=())


class ChatChunkFormat:
    """Turns deltas into the choices of `chat.completion.chunk` events.

    The first chunk of each choice carries the role.
    """

    def __init__(self, shown: ShownParts) -> None:
        self._shown = shown
        self._hidden = HiddenReasoning(shown)
        self._begun: set[int] = set()

    def choice(self, delta: Delta) -> dict[str, object]:
        """Returns the chunk's choice for `delta`."""
        delta = self._hidden.removed(delta)
        fields: dict[str, object] = {}
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            fields["role"] = "assistant"
        if delta.tool_calls:
            fields["tool_calls"] = self._shown.calls(delta)
        if delta.reasoning:
            fields["reasoning"] = delta.reasoning
        if delta.text or not (delta.tool_calls or delta.reasoning):
            fields["content"] = delta.text
        return {
            "index": delta.index,
            "delta": fields,
            "logprobs": self._shown.logprobs(chat_entries(delta.logprobs)),
            **ending(delta),
        }


class ChatChoice(Choice):
    """Collects one choice of a buffered chat completion.

    `content` is null if the choice has only tool calls or reasoning.
    """

    def __init__(self, shown: ShownParts) -> None:
        super().__init__()
        self._shown = shown
        self._hidden = HiddenReasoning(shown)
        self._entries: list[orjson.Fragment] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, delta: Delta) -> None:
        """Appends `delta`, tool calls included."""
        delta = self._hidden.removed(delta)
        super().add(delta)
        self._entries += chat_entries(delta.logprobs)
        self._reasoning.append(delta.reasoning)
        for part in self._shown.calls(delta):
            self._add_call(part)

    def _add_call(self, part: Mapping[str, Any]) -> None:
        call = self._calls.setdefault(part["index"], {"type": "function", "function": {"arguments": ""}})
        call.update({key: part[key] for key in ("id", "type") if part.get(key)})
        function = part.get("function") or {}
        if function.get("name"):
            call["function"]["name"] = function["name"]
        call["function"]["arguments"] += function.get("arguments") or ""

    def fields(self) -> dict[str, object]:
        """The message and its logprobs."""
        calls = [self._calls[index] for index in sorted(self._calls)]
        text, reasoning = "".join(self.text), "".join(self._reasoning)
        empty = None if calls or reasoning else ""
        message: dict[str, object] = {"role": "assistant", "content": text or empty, "refusal": None}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "message": message,
            "logprobs": self._shown.logprobs(self._entries),
        }
