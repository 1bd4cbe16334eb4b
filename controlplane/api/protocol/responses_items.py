"""Items of the bodies of POST /v1/responses: what they may be, and the chat messages that they become.

Imports only `types`.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Required

from pydantic import Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from controlplane.api.protocol.types import (
    CLOSED,
    MAX_PARTS,
    Text,
    as_parts,
    conflict,
    expecting,
    image_part,
    only_parts,
    stated,
)

# Members of an item without which it means nothing.
_REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_PART_TYPES = (
    *("input_text", "output_text", "refusal", "text", "reasoning_text", "summary_text"),
    "input_image",
)
_ITEM_TYPES = (
    '"message", "function_call", "function_call_output" or "reasoning"; items that refer to stored state or '
    "belong to built-in tools are not supported"
)


class ItemPart(TypedDict, total=False):
    """A part of an item, as clients write it or as responses return it: a text, or an image of a user."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Required[Literal[*_PART_TYPES]]  # type: ignore[valid-type]
    text: str
    image_url: str
    detail: Literal["auto"] | None
    file_id: None
    refusal: str
    annotations: Any
    logprobs: Any
    prompt_cache_breakpoint: Any


ItemContent = Annotated[
    str | Annotated[list[ItemPart], Field(max_length=MAX_PARTS, fail_fast=True)],
    only_parts(*_PART_TYPES),
]


class InputItem(TypedDict, total=False):
    """An item of `input`: a message, a function call, its output, or the reasoning before them.

    Responses are sent back as items, so that all their members are accepted.
    """

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Annotated[Literal[*_REQUIRED], expecting(_ITEM_TYPES)]  # type: ignore[valid-type]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["system", "developer", "user", "assistant"]
    content: ItemContent
    phase: Any
    call_id: Text
    name: Text
    arguments: str
    output: ItemContent
    summary: ItemContent
    encrypted_content: str
    caller: Any


def as_items(value: Any) -> Any:
    """The `input` as a list of items."""
    if not isinstance(value, str | list):
        raise PydanticCustomError("shape", "expected {expected}", {"expected": "a string or a list of items"})
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return [stated(item) for item in value]


def check_items(items: Sequence[InputItem]) -> None:
    """Raises `conflict` for an item without its members, or an output without its call."""
    calls: set[str] = set()
    for at, item in enumerate(items):
        kind = item.get("type", "message")
        for name in _REQUIRED[kind]:
            if name not in item:
                raise conflict(f"input[{at}].{name}", f"an item of type {kind} needs it; add it")
        if kind == "function_call":
            calls.add(item["call_id"])
        elif kind == "function_call_output" and item["call_id"] not in calls:
            raise conflict(
                f"input[{at}].call_id",
                "no earlier function_call has this id; send the call before its output",
            )


def messages_of(items: Iterable[InputItem]) -> Iterable[dict[str, Any]]:
    """Chat messages of items; consecutive items of the assistant are one message.

    Chat templates take no images in a tool's result, so they begin the user's message after the results.
    """
    seen: list[dict[str, Any]] = []
    for message in _messages(items):
        if message["role"] == "tool":
            parts = message["content"]
            if isinstance(parts, list):
                seen += [part for part in parts if part["type"] != "text"]
                message["content"] = [part for part in parts if part["type"] == "text"]
        elif seen:
            if message["role"] == "user":
                message["content"] = [*seen, *as_parts(message["content"])]
            else:
                yield {"role": "user", "content": seen}
            seen = []
        yield message
    if seen:
        yield {"role": "user", "content": seen}


def _messages(items: Iterable[InputItem]) -> Iterable[dict[str, Any]]:
    turn: dict[str, Any] | None = None
    for at, item in enumerate(items):
        kind, role, field = item.get("type", "message"), item.get("role"), f"input[{at}].content"
        if kind == "function_call_output" or (kind == "message" and role != "assistant"):
            if turn is not None:
                yield _whole(turn)
            turn = None
            if kind == "message":
                yield {"role": role, "content": _content(item.get("content"), field)}
            else:
                yield {
                    "role": "tool",
                    "tool_call_id": item["call_id"],
                    "content": _content(item.get("output"), f"input[{at}].output"),
                }
            continue
        turn = turn or {"role": "assistant", "content": None}
        if kind == "message":
            turn["content"] = turn["content"] or []
            turn["content"] += _parts(item.get("content"), field)
        elif kind == "reasoning":
            turn.setdefault("reasoning", []).append(_reasoning(item))
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
    if turn is not None:
        yield _whole(turn)


def _whole(turn: dict[str, Any]) -> dict[str, Any]:
    """The turn with the pieces of its reasoning as one text.

    They are joined once: a body has up to 4,096 pieces, and each copy holds the interpreter lock.
    """
    return turn | {"reasoning": "".join(turn["reasoning"])} if "reasoning" in turn else turn


def _content(content: str | list[ItemPart] | None, field: str) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else _parts(content, field)


def _parts(content: str | list[ItemPart] | None, field: str) -> list[dict[str, Any]]:
    """Parts of a chat message. Raises `conflict` for an image without its data."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_part(part, f"{field}[{at}]") for at, part in enumerate(content or ())]


def _part(part: ItemPart, field: str) -> dict[str, Any]:
    if part["type"] != "input_image":
        return {"type": "text", "text": _text(part)}
    if "image_url" not in part:
        raise conflict(f"{field}.image_url", "a part of type input_image needs it; add the image's data URL")
    return image_part(part["image_url"], field)


def _text(part: ItemPart) -> str:
    return part.get("text") or part.get("refusal") or ""


def _reasoning(item: InputItem) -> str:
    content = item.get("content") or item.get("summary") or ""
    return content if isinstance(content, str) else "".join(map(_text, content))
