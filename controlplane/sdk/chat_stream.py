"""The text of a streamed chat, parsed without I/O, for both clients."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import orjson

from controlplane.api.protocol.requests import Usage
from controlplane.sdk.api_calls import HttpCall
from controlplane.sdk.deadline import CallDeadline, ended_by
from controlplane.sdk.errors import MALFORMED, StreamLost, TandemError, api_error
from controlplane.sdk.replies import ChatReply, Decision, decision


class ChatEvents:
    """Parses the server-sent events of one chat.

    Lines are split at LF only, because JSON may contain U+2028.
    """

    def __init__(self) -> None:
        self._headers = httpx.Headers()
        self._rest = b""
        self._seen: list[str] = []
        self.is_done = False
        self.decision: Decision | None = None
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self._calls: dict[int, dict[str, Any]] = {}
        self._thoughts: list[str] = []

    def begin(self, headers: httpx.Headers) -> None:
        """Call at the start of the response."""
        self._headers = headers
        self.decision = decision(headers)

    def read(self, received: bytes) -> Iterator[str]:
        """Parses received bytes and yields their text. Raises StreamLost for an error event."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (text := self._text_of(line[5:].strip())):
                self._seen.append(text)
                yield text

    def end(self) -> None:
        """Call at the end of the connection. Raises StreamLost if [DONE] was not received."""
        if not self.is_done:
            raise self.lost("the connection closed")

    def lost(self, why: str) -> StreamLost:
        """The exception for a broken stream, with the text received so far."""
        return StreamLost(f"the stream ended before the response was complete: {why}", self.text)

    @property
    def text(self) -> str:
        """The text received so far."""
        return "".join(self._seen)

    def _text_of(self, content: bytes) -> str:
        """The text of an event. Raises StreamLost for an error, and for an event of another format."""
        try:
            return self._chunk(content)
        except MALFORMED as error:
            raise self.lost(f"an event is none of this API ({error!r}): {content[:100]!r}") from error

    def _chunk(self, content: bytes) -> str:
        if content == b"[DONE]":
            self.is_done = True
            return ""
        chunk = orjson.loads(content)
        if "error" in chunk:
            error = api_error(500, content, self._headers)
            raise self.lost(error.message) from error
        if chunk.get("usage"):
            self.usage = Usage.model_validate(chunk["usage"])
        text = ""
        for choice in chunk["choices"]:
            if choice.get("index"):
                continue
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            text += choice["delta"].get("content") or ""
            self._thoughts.append(choice["delta"].get("reasoning") or "")
            for piece in choice["delta"].get("tool_calls") or ():
                self._add_to_call(**piece)
        return text

    def _add_to_call(self, index: int, function: Mapping[str, Any] | None = None, **named: Any) -> None:
        """Adds a piece of a tool call: the first has id, type and name; the arguments come in any number."""
        empty = {"id": None, "type": "function", "function": {"name": None, "arguments": ""}}
        call, piece = self._calls.setdefault(index, empty), function or {}
        call |= {key: value for key, value in named.items() if value}
        called = call["function"]
        called["name"] = piece.get("name") or called["name"]
        called["arguments"] += piece.get("arguments") or ""

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls received so far, in order."""
        return [self._calls[index] for index in sorted(self._calls)]

    @property
    def reasoning(self) -> str:
        """The reasoning received so far."""
        return "".join(self._thoughts)


class Streamed:
    """Properties of the first choice that both kinds of stream share.

    `usage`, `finish_reason` and `tool_calls` are complete at the end of the stream, `reasoning` when the text
    begins.
    """

    def __init__(self, call: HttpCall[ChatReply]) -> None:
        self._call = call
        self._response: httpx.Response | None = None
        self._events = ChatEvents()

    def _lost(self, error: httpx.TransportError) -> TandemError:
        """The exception for a broken connection, or one that the deadline ended, with the received text."""
        ended = ended_by(self._deadline, error, self._call.path)
        if ended is None:
            return self._events.lost(repr(error))
        ended.text = self._events.text
        return ended

    @property
    def _deadline(self) -> CallDeadline | None:
        """The deadline of what is still to be received."""
        return None if self._events.is_done else self._call.deadline

    @property
    def decision(self) -> Decision | None:
        """The decision of the gate; None before the stream has begun."""
        return self._events.decision

    @property
    def usage(self) -> Usage | None:
        """Token counts; None before the end."""
        return self._events.usage

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the response; None before the end."""
        return self._events.finish_reason

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls received so far, in order."""
        return self._events.tool_calls

    @property
    def reasoning(self) -> str:
        """The reasoning received so far."""
        return self._events.reasoning
