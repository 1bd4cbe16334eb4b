"""POST /v2/chat, /v2/embed, /v1/tokenize and /v1/detokenize: Cohere's protocol, mapped onto the others."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from starlette.routing import Route
from starlette.types import Send

from controlplane.api.error_dialects import renamed_fields
from controlplane.api.errors import MAX_MESSAGE_BYTES, Failure, clipped
from controlplane.api.openai.buffered import UsageCounter
from controlplane.api.openai.chat import ShownParts
from controlplane.api.openai.embeddings import computed_vectors, encoded_vectors
from controlplane.api.openai.logprobs import bounded_logprob
from controlplane.api.openai.output_items import ItemChange, ItemEncoder, OutputItem, event, serve_chat
from controlplane.api.post_endpoint import EndpointFactory, ParsedRequest, send_json, ticket_headers
from controlplane.api.protocol.cohere_messages import CohereChatRequest
from controlplane.api.protocol.cohere_texts import (
    CohereDetokenizeRequest,
    CohereEmbedRequest,
    CohereTokenizeRequest,
)
from controlplane.core.generation import TokenLogprob
from controlplane.core.ports import TruncationSide
from controlplane.service.request_jobs import TruncationRequest
from controlplane.service.service import Service

# Names of a model's prompts that stand for an input type, by preference.
_PROMPTS = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
_SIDES: Mapping[str | None, TruncationSide] = {"START": "left", "END": "right", None: "right"}
# Fields of embeddings, in errors, and Cohere's.
_EMBED_FIELDS = {
    "input": "texts",
    "dimensions": "output_dimension",
    "truncate_prompt_tokens": "max_tokens",
    "prompt_name": "input_type",
}


def cohere_routes(service: Service, endpoints: EndpointFactory) -> list[Route]:
    """The routes of Cohere's protocol, without that of reranking."""
    return [
        endpoints.route("/v2/chat", CohereChatRequest, partial(_chat, service)),
        endpoints.route("/v2/embed", CohereEmbedRequest, partial(_embed, service)),
        endpoints.route("/v1/tokenize", CohereTokenizeRequest, partial(_tokenize, service)),
        endpoints.route("/v1/detokenize", CohereDetokenizeRequest, partial(_detokenize, service)),
    ]


async def _chat(service: Service, request: ParsedRequest[CohereChatRequest], send: Send) -> None:
    body = request.body
    encoder = partial(CohereEncoder, request.origin.request_id, has_plan=body.may_call)
    names = {"response_format.json_schema.schema": body.schema_field}
    await serve_chat(service, request, body.chat, send, encoder=encoder, names=names)


async def _embed(service: Service, request: ParsedRequest[CohereEmbedRequest], send: Send) -> None:
    body = request.body
    side = _SIDES.get(body.truncate)
    with renamed_fields(_EMBED_FIELDS):
        job, embedded, vectors = await computed_vectors(
            service,
            request,
            body.texts,
            truncation=None if side is None else TruncationRequest(body.max_tokens, side),
            prompt=_prompt(service, body),
            dimensions=body.output_dimension,
        )
    columns = [
        b'"%b":[%b]' % (kind.encode(), b",".join(await encoded_vectors(vectors, is_base64=kind == "base64")))
        for kind in dict.fromkeys(body.embedding_types or ["float"])
    ]
    tail = {
        "id": request.origin.request_id,
        "texts": body.texts,
        "response_type": "embeddings_by_type",
        "meta": _meta("2") | {"billed_units": {"input_tokens": job.request.prompt_tokens}},
    }
    reply = b'{"embeddings":{' + b",".join(columns) + b"}," + orjson.dumps(tail)[1:]
    await send_json(send, reply, ticket_headers([embedded.ticket]))


def _prompt(service: Service, body: CohereEmbedRequest) -> str | None:
    """The prompt of the model for the input type; None if it has none, which means its default prompt."""
    embedder = service.encoders.embedders.get(body.model)
    names = _PROMPTS.get(body.input_type or "", ())
    return None if embedder is None else next((name for name in names if name in embedder.prompts), None)


async def _tokenize(service: Service, request: ParsedRequest[CohereTokenizeRequest], send: Send) -> None:
    body = request.body
    with renamed_fields({"prompt": "text"}):
        found = await service.intake.tokenization.text(
            request.origin.caller, body.model, body.text, add_special_tokens=False, has_strings=True
        )
    reply = {"tokens": found.token_ids, "token_strings": found.strings, "meta": _meta("1")}
    await send_json(send, orjson.dumps(reply), [])


async def _detokenize(service: Service, request: ParsedRequest[CohereDetokenizeRequest], send: Send) -> None:
    text = await service.intake.tokenization.decoded(
        request.origin.caller, request.body.model, request.body.tokens
    )
    await send_json(send, orjson.dumps({"text": text, "meta": _meta("1")}), [])


def _meta(version: str) -> dict[str, object]:
    return {"api_version": {"version": version}}


class CohereEncoder(ItemEncoder):
    """Builds one message, as a whole or as Cohere's sequence of events.

    With `has_plan` the reasoning is the plan of the tool calls, otherwise a part of the content.
    """

    def __init__(self, answer_id: str, shown: ShownParts, counter: UsageCounter, *, has_plan: bool) -> None:
        super().__init__(shown, counter)
        self._id = answer_id
        self._has_logprobs = shown.has_logprobs
        self._has_plan = has_plan

    def answer(self) -> dict[str, object]:
        """The complete answer."""
        items = self.output.items
        content = [_part(item.kind, item.text) for item in items if self._place(item) == "content"]
        calls = [_call(item, item.text) for item in items if item.kind == "call"]
        plan = "".join(item.text for item in items if self._place(item) == "plan")
        message: dict[str, object] = {"role": "assistant"}
        members = {"content": content, "tool_plan": plan, "tool_calls": calls}
        message |= {name: value for name, value in members.items() if value}
        answer = {"id": self._id, "message": message, **self._ending()}
        if self._has_logprobs:
            answer["logprobs"] = [_logprobs([token]) for item in items for token in item.logprobs]
        return answer

    def begin(self) -> bytes:
        """The event that announces the message."""
        return event("message-start", id=self._id, delta={"message": {"role": "assistant"}})

    def changed(self, change: ItemChange, *, is_last: bool) -> bytes:
        """Cohere's event of a change; a plan has no beginning or end."""
        item, place = change.item, self._place(change.item)
        if place == "plan":
            return _delta("tool-plan-delta", tool_plan=change.piece) if change.step == "grown" else b""
        kind, index = ("tool-call" if place == "call" else "content"), self._index(item)
        if change.step == "closed":
            return event(f"{kind}-end", index=index)
        if place == "call":
            if change.step == "opened":
                return _delta(f"{kind}-start", index, tool_calls=_call(item, ""))
            return _delta(f"{kind}-delta", index, tool_calls={"function": {"arguments": change.piece}})
        if change.step == "opened":
            return _delta(f"{kind}-start", index, content=_part(item.kind, ""))
        part = _part(item.kind, change.piece)
        del part["type"]
        logprobs = _logprobs(change.logprobs) if self._has_logprobs and change.logprobs else None
        return _delta(f"{kind}-delta", index, logprobs, content=part)

    def finish(self) -> bytes:
        """The event of the end."""
        return event("message-end", id=self._id, delta=self._ending())

    def fail(self, failure: Failure) -> bytes:
        """A `message-end` event with the error."""
        message = clipped(failure.message, MAX_MESSAGE_BYTES)
        return event("message-end", id=self._id, delta={"finish_reason": "ERROR", "error": message})

    def _place(self, item: OutputItem) -> str:
        """Where Cohere's message has an item."""
        if item.kind == "reasoning" and self._has_plan:
            return "plan"
        return "call" if item.kind == "call" else "content"

    def _index(self, item: OutputItem) -> int:
        """The position of an item among those at its place."""
        place = self._place(item)
        return sum(self._place(earlier) == place for earlier in self.output.items[: item.index])

    def _ending(self) -> dict[str, object]:
        output = self.output
        reason = "STOP_SEQUENCE" if isinstance(output.stop_reason, str) else "COMPLETE"
        if output.finish_reason == "length":
            reason = "MAX_TOKENS"
        elif output.can_run_calls:
            reason = "TOOL_CALL"
        prompt, cached, tokens = self.counter.counts
        counts = {"input_tokens": prompt, "output_tokens": tokens}
        return {
            "finish_reason": reason,
            "usage": {"billed_units": counts, "tokens": counts, "cached_tokens": cached},
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    name = "thinking" if kind == "reasoning" else "text"
    return {"type": name, name: text}


def _call(item: OutputItem, arguments: str) -> dict[str, object]:
    function = {"name": item.name, "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, object]:
    """Cohere's object for the tokens of one piece of text."""
    return {
        "text": "".join(token.token for token in tokens),
        "token_ids": [token.token_id for token in tokens],
        "logprobs": [bounded_logprob(token) for token in tokens],
    }


def _delta(kind: str, index: int | None = None, logprobs: object = None, /, **message: object) -> bytes:
    """An event that adds to the message."""
    fields = {"index": index, "delta": {"message": message}, "logprobs": logprobs}
    return event(kind, **{name: value for name, value in fields.items() if value is not None})
