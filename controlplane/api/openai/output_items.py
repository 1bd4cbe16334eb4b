"""Serves chats to protocols whose answers are lists of items: OpenAI's Responses and Anthropic's Messages.

An item is the reasoning, a text or one function call. Each is complete before the next begins.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import orjson
from starlette.types import Send

from controlplane.api.error_dialects import renamed_fields
from controlplane.api.errors import Failure
from controlplane.api.openai.buffered import UsageCounter, collect
from controlplane.api.openai.chat import ShownParts, chat_job
from controlplane.api.openai.sampling import chat_prompt
from controlplane.api.openai.streaming import send_stream
from controlplane.api.post_endpoint import ParsedRequest, send_json, ticket_headers
from controlplane.api.protocol.requests import ChatCompletionRequest
from controlplane.core.errors import BackendFailed
from controlplane.core.generation import Delta, TokenLogprob
from controlplane.service.service import Service

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class OutputItem:
    """One item; `call` is the index of the function call that it is."""

    kind: Kind
    index: int
    call: int | None = None
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, or the arguments of the call."""
        return "".join(self.pieces)


class ItemChange(NamedTuple):
    """One step of an item; `piece` and `logprobs` are what a growing item has gained."""

    step: Literal["opened", "grown", "closed"]
    item: OutputItem
    piece: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


class OutputItems:
    """The items of one answer, in their order."""

    def __init__(self, shown: ShownParts) -> None:
        self._shown = shown
        self._held: tuple[TokenLogprob, ...] = ()
        self.items: list[OutputItem] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def can_run_calls(self) -> bool:
        """Whether there are calls for the client to run: not if a stop sequence cut the last one short."""
        arguments = [item.text for item in self.items if item.kind == "call"]
        if not arguments or not isinstance(self.stop_reason, str):
            return bool(arguments)
        try:
            orjson.loads(arguments[-1])
        except orjson.JSONDecodeError:
            return False
        return True

    def add(self, delta: Delta) -> list[ItemChange]:
        """Adds `delta` and returns what it changes. Raises BackendFailed if a completed call continues."""
        return list(self._grow_all(delta))

    def _grow_all(self, delta: Delta) -> Iterator[ItemChange]:
        # The text of a token may arrive later than its log probability.
        self._held += delta.logprobs
        calls = self._shown.calls(delta)
        if delta.reasoning and not self._shown.hides_reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        # A delta of several tokens may have the end of a call and text after it.
        is_call_open = bool(self.items) and self.items[-1].call is not None
        if is_call_open and any(call["index"] == self.items[-1].call for call in calls):
            yield from self._grow_calls(calls)
            calls = []
        if delta.text:
            yield from self._grow("text", delta.text, self._held)
        yield from self._grow_calls(calls)
        if delta.reasoning or delta.text or delta.tool_calls:
            self._held = ()
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def close(self) -> list[ItemChange]:
        """Completes the last item; an answer without any has one empty text."""
        opened = [] if self.items else [self._open("text")]
        return [*opened, ItemChange("closed", self.items[-1])]

    def _grow_calls(self, calls: Iterable[Mapping[str, Any]]) -> Iterator[ItemChange]:
        for call in calls:
            function = call.get("function") or {}
            yield from self._grow(
                "call",
                function.get("arguments") or "",
                call=call["index"],
                call_id=call.get("id") or "",
                name=function.get("name") or "",
            )

    def _grow(
        self,
        kind: Kind,
        piece: str,
        logprobs: tuple[TokenLogprob, ...] = (),
        *,
        call: int | None = None,
        call_id: str = "",
        name: str = "",
    ) -> Iterator[ItemChange]:
        last = self.items[-1] if self.items else None
        if last is None or (last.kind, last.call) != (kind, call):
            if call is not None and any(item.call == call for item in self.items):
                raise BackendFailed(f"the tool parser continued call {call} after a later item had begun")
            if last is not None:
                yield ItemChange("closed", last)
            yield self._open(kind, call, call_id, name)
        item = self.items[-1]
        item.name = item.name or name
        if piece:
            item.pieces.append(piece)
            item.logprobs += logprobs
            yield ItemChange("grown", item, piece, logprobs)

    def _open(self, kind: Kind, call: int | None = None, call_id: str = "", name: str = "") -> ItemChange:
        self.items.append(OutputItem(kind, len(self.items), call, call_id, name))
        return ItemChange("opened", self.items[-1])


class ItemEncoder(ABC):
    """Encodes one answer, as a whole or as a sequence of events."""

    def __init__(self, shown: ShownParts, counter: UsageCounter) -> None:
        self.output = OutputItems(shown)
        self.counter = counter

    @abstractmethod
    def begin(self) -> bytes:
        """The events that announce the answer."""

    @abstractmethod
    def changed(self, change: ItemChange, *, is_last: bool) -> bytes:
        """The events of a change; `is_last` at the end of the last item."""

    @abstractmethod
    def finish(self) -> bytes:
        """The events after the last item."""

    @abstractmethod
    def fail(self, failure: Failure) -> bytes:
        """The last event of a stream that failed after it began."""

    @abstractmethod
    def answer(self) -> Mapping[str, object]:
        """The complete answer as JSON."""

    def add(self, delta: Delta) -> None:
        """Adds `delta` to an answer that is sent as a whole. Raises BackendFailed."""
        self.output.add(delta)

    def encode(self, delta: Delta) -> bytes:
        """The events of the items that `delta` opens, continues and completes."""
        return b"".join(self.changed(change, is_last=False) for change in self.output.add(delta))

    def end(self) -> bytes:
        """The end of the last item and of the answer."""
        return b"".join(self.changed(change, is_last=True) for change in self.output.close()) + self.finish()


async def serve_chat(
    service: Service,
    request: ParsedRequest[Any],
    chat: ChatCompletionRequest,
    send: Send,
    *,
    encoder: Callable[[ShownParts, UsageCounter], ItemEncoder],
    names: Mapping[str, str],
) -> None:
    """Runs the chat that `request` maps onto and sends the answer, buffered or streamed.

    Args:
        service: runs the chat.
        request: the request in its own protocol.
        chat: the same request to chat.
        send: ASGI send.
        encoder: makes the encoder of the answer.
        names: chat's names of fields in errors, and those of the protocol.
    """
    with renamed_fields(names):
        job = await chat_job(service, request, chat)
        counter = UsageCounter(job.request.prompt_tokens, n=1)
        built = encoder(ShownParts.of(chat), counter)
        if chat.stream:
            status = request.settings.overload_status
            await send_stream(send, service.gate, [job], encoder=built, overload_status=status)
            return
        tickets = await collect(service.gate, [job], counter, built.add)
        built.output.close()
        await send_json(send, orjson.dumps(built.answer()), ticket_headers(tickets))


async def counted_tokens(
    service: Service, request: ParsedRequest[Any], chat: ChatCompletionRequest, *, names: Mapping[str, str]
) -> int:
    """The prompt tokens of the chat that `request` maps onto; `names` as in `serve_chat`."""
    with renamed_fields(names):
        prompt = chat_prompt(chat)
        found = await service.intake.tokenization.chat(
            request.origin.caller, request.body.model, prompt, has_strings=False
        )
    return len(found.token_ids)


def event(kind: str, /, **fields: object) -> bytes:
    """A server-sent event that has its type in its data, too."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"
