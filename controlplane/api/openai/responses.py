"""POST /v1/responses, buffered or streamed, and /v1/responses/input_tokens: a mapping onto chat."""

import time
from functools import partial
from typing import Any

import orjson
from starlette.routing import Route
from starlette.types import Send

from controlplane.api.errors import Failure
from controlplane.api.openai.buffered import UsageCounter
from controlplane.api.openai.chat import ShownParts
from controlplane.api.openai.logprobs import response_entries
from controlplane.api.openai.output_items import (
    ItemChange,
    ItemEncoder,
    OutputItem,
    counted_tokens,
    event,
    serve_chat,
)
from controlplane.api.post_endpoint import EndpointFactory, ParsedRequest, send_json
from controlplane.api.protocol.responses_messages import InputTokensRequest, ResponsesRequest
from controlplane.core.generation import Delta
from controlplane.service.service import Service

# Chat's names of fields, in errors, and those of this protocol.
_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    ".function.parameters": ".parameters",
}
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
# Types of the parts of items, which are the names of their events, too.
_KINDS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
_ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "top_logprobs", "user")


def responses_routes(service: Service, endpoints: EndpointFactory) -> list[Route]:
    """The routes of responses."""
    return [
        endpoints.route("/v1/responses", ResponsesRequest, partial(_serve, service)),
        endpoints.route("/v1/responses/input_tokens", InputTokensRequest, partial(_count, service)),
    ]


async def _serve(service: Service, request: ParsedRequest[ResponsesRequest], send: Send) -> None:
    encoder = partial(ResponseEncoder, request.origin.request_id, request.body)
    await serve_chat(service, request, request.body.chat, send, encoder=encoder, names=_FIELDS)


async def _count(service: Service, request: ParsedRequest[InputTokensRequest], send: Send) -> None:
    tokens = await counted_tokens(service, request, request.body.chat, names=_FIELDS)
    await send_json(send, orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens}), [])


class ResponseEncoder(ItemEncoder):
    """Builds one response, as a whole or as OpenAI's sequence of events."""

    def __init__(
        self, request_id: str, body: ResponsesRequest, shown: ShownParts, counter: UsageCounter
    ) -> None:
        super().__init__(shown, counter)
        self._request_id = request_id
        self._number = 0
        self._head = _head(f"resp_{request_id}", body)
        self._entries: dict[int, list[orjson.Fragment]] = {}
        """Encoded log probabilities of each text so far, by the index of its item."""

    def answer(self) -> dict[str, object]:
        """The complete response."""
        return self._snapshot(self._status)

    def add(self, delta: Delta) -> None:
        """Adds `delta` to a response that is sent as a whole."""
        for change in self.output.add(delta):
            self._encoded(change.item)

    def _encoded(self, item: OutputItem) -> list[orjson.Fragment]:
        """The log probabilities of a text, each encoded once: four events at a stream's end have all."""
        entries = self._entries.setdefault(item.index, [])
        entries += response_entries(item.logprobs[len(entries) :])
        return entries

    def begin(self) -> bytes:
        """The events that announce the response."""
        started = self._snapshot("in_progress")
        return self._event("created", response=started) + self._event("in_progress", response=started)

    def finish(self) -> bytes:
        """The event with the whole response."""
        return self._event(self._status, response=self.answer())

    def fail(self, failure: Failure) -> bytes:
        """An `error` event, with the error object as in an error response."""
        error = orjson.loads(failure.body)["error"]
        stated = {"code": error["code"], "message": error["message"], "param": error["param"]}
        return event("error", sequence_number=self._number, **stated, error=error)

    @property
    def _status(self) -> str:
        return "incomplete" if self.output.finish_reason == "length" else "completed"

    def _snapshot(self, status: str) -> dict[str, object]:
        is_over = status != "in_progress"
        items = self.output.items if is_over else []
        last = len(items) - 1
        state = {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [
                self._item(item, status if item.index == last else "completed", is_begun=False)
                for item in items
            ],
            "usage": self._usage() if is_over else None,
        }
        return self._head | state

    def _usage(self) -> dict[str, object]:
        prompt, cached, output = self.counter.counts
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self.counter.reasoning_tokens},
            "total_tokens": prompt + output,
        }

    def _id(self, item: OutputItem) -> str:
        return f"{_PREFIXES[item.kind]}_{self._request_id}_{item.index}"

    def _item(self, item: OutputItem, status: str, *, is_begun: bool) -> dict[str, object]:
        """The item as JSON; one that `is_begun` only has no content yet."""
        fields: dict[str, object] = {"id": self._id(item), "status": "in_progress" if is_begun else status}
        if item.kind == "call":
            arguments = "" if is_begun else item.text
            call = {"call_id": item.call_id, "name": item.name, "arguments": arguments}
            return {"type": "function_call"} | fields | call
        content = [] if is_begun else [self._part(item)]
        if item.kind == "reasoning":
            return {"type": "reasoning"} | fields | {"summary": [], "content": content}
        return {"type": "message"} | fields | {"role": "assistant", "content": content}

    def changed(self, change: ItemChange, *, is_last: bool) -> bytes:
        """OpenAI's events of a change. One that grows costs the size of its piece, not of the item."""
        item, kind = change.item, _KINDS[change.item.kind]
        at = {"output_index": item.index}
        within = at | {"item_id": self._id(item)} | ({} if item.kind == "call" else {"content_index": 0})
        match change.step:
            case "grown":
                entries = self._encoded(item)
                new = entries[len(entries) - len(change.logprobs) :]
                logprobs = {"logprobs": new} if item.kind == "text" else {}
                return self._event(f"{kind}.delta", **within, delta=change.piece, **logprobs)
            case "opened":
                events = self._event("output_item.added", **at, item=self._item(item, "", is_begun=True))
                if item.kind != "call":
                    events += self._event(
                        "content_part.added", **within, part=self._part(item, is_empty=True)
                    )
                return events
            case "closed":
                shown = self._item(item, self._status if is_last else "completed", is_begun=False)
                if item.kind == "call":
                    done = self._event(f"{kind}.done", **within, name=item.name, arguments=item.text)
                else:
                    part = self._part(item)
                    texts = {name: part[name] for name in ("text", "logprobs") if name in part}
                    done = self._event(f"{kind}.done", **within, **texts)
                    done += self._event("content_part.done", **within, part=part)
                return done + self._event("output_item.done", **at, item=shown)

    def _part(self, item: OutputItem, *, is_empty: bool = False) -> dict[str, Any]:
        text = "" if is_empty else item.text
        part = {"type": _KINDS[item.kind], "text": text}
        if item.kind == "reasoning":
            return part
        return part | {"annotations": [], "logprobs": [] if is_empty else self._encoded(item)}

    def _event(self, name: str, /, **fields: object) -> bytes:
        self._number += 1
        return event(f"response.{name}", sequence_number=self._number - 1, **fields)


def _head(response_id: str, body: ResponsesRequest) -> dict[str, object]:
    """The fields that do not change while the response is generated."""
    echoed = {name: getattr(body, name) for name in _ECHOED}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": body.model,
        "error": None,
        "background": False,
        "store": False,
        "previous_response_id": None,
        "service_tier": "default",
        "truncation": "disabled",
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
        **body.echo,
        **echoed,
        "metadata": body.metadata or {},
    }
