"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol as a mapping onto chat."""

from functools import partial
from typing import Any

import orjson
from starlette.routing import Route
from starlette.types import Send

from controlplane.api.error_dialects import anthropic_error
from controlplane.api.errors import Failure
from controlplane.api.openai.buffered import UsageCounter
from controlplane.api.openai.chat import ShownParts
from controlplane.api.openai.output_items import (
    ItemChange,
    ItemEncoder,
    OutputItem,
    counted_tokens,
    event,
    serve_chat,
)
from controlplane.api.post_endpoint import EndpointFactory, ParsedRequest, send_json
from controlplane.api.protocol.anthropic_messages import CountTokensRequest, MessagesRequest
from controlplane.service.service import Service

# Chat's names of fields, in errors, and Anthropic's.
_FIELDS = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    ".function.parameters": ".input_schema",
}
# The member of a block that grows, and the type of its deltas.
_GROWING = {
    "reasoning": ("thinking", "thinking_delta", "thinking"),
    "text": ("text", "text_delta", "text"),
    "call": ("input", "input_json_delta", "partial_json"),
}


def anthropic_routes(service: Service, endpoints: EndpointFactory) -> list[Route]:
    """The routes of Anthropic's protocol."""
    return [
        endpoints.route("/v1/messages", MessagesRequest, partial(_serve, service)),
        endpoints.route("/v1/messages/count_tokens", CountTokensRequest, partial(_count, service)),
    ]


async def _serve(service: Service, request: ParsedRequest[MessagesRequest], send: Send) -> None:
    encoder = partial(MessageEncoder, f"msg_{request.origin.request_id}", request.body.model)
    await serve_chat(service, request, request.body.chat, send, encoder=encoder, names=_FIELDS)


async def _count(service: Service, request: ParsedRequest[CountTokensRequest], send: Send) -> None:
    tokens = await counted_tokens(service, request, request.body.chat, names=_FIELDS)
    await send_json(send, orjson.dumps({"input_tokens": tokens}), [])


class MessageEncoder(ItemEncoder):
    """Builds one message, as a whole or as Anthropic's sequence of events."""

    def __init__(self, message_id: str, model: str, shown: ShownParts, counter: UsageCounter) -> None:
        super().__init__(shown, counter)
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}

    def answer(self) -> dict[str, object]:
        """The complete message."""
        content = [_block(item, item.text) for item in self.output.items]
        return self._head | {"content": content, **self._ending(), "usage": self._usage()}

    def begin(self) -> bytes:
        """The event that announces the message."""
        return event("message_start", message=self.answer() | {"stop_reason": None})

    def changed(self, change: ItemChange, *, is_last: bool) -> bytes:
        """Anthropic's event of a change."""
        item = change.item
        if change.step == "opened":
            return event("content_block_start", index=item.index, content_block=_block(item, ""))
        if change.step == "closed":
            return event("content_block_stop", index=item.index)
        _, kind, name = _GROWING[item.kind]
        return event("content_block_delta", index=item.index, delta={"type": kind, name: change.piece})

    def finish(self) -> bytes:
        """The events of the end."""
        return event("message_delta", delta=self._ending(), usage=self._usage()) + event("message_stop")

    def fail(self, failure: Failure) -> bytes:
        """An `error` event."""
        return b"event: error\ndata: " + anthropic_error(failure) + b"\n\n"

    def _ending(self) -> dict[str, object]:
        output, sequence = self.output, self.output.stop_reason
        if output.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if output.can_run_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        # A number is the id of a token that ends the turn.
        if isinstance(sequence, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, object]:
        prompt, cached, output = self.counter.counts
        # Anthropic counts cached tokens apart.
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output,
        }


def _block(item: OutputItem, text: str) -> dict[str, Any]:
    if item.kind == "call":
        return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": _input(text)}
    name = _GROWING[item.kind][0]
    return {"type": name, name: text} | ({"signature": ""} if item.kind == "reasoning" else {})


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call, which must be an object; a truncated call has the text itself in one."""
    try:
        found = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        found = None
    # The name under which Anthropic's documentation passes such arguments on.
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}
