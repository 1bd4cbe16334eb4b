"""Bodies of POST /v2/chat: Cohere's protocol, mapped onto chat.

As strict as all other bodies. Imports only `requests` and `types`.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, Required, Self

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import TypedDict

from controlplane.api.protocol.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatCompletionRequest,
    Name,
    Objectives,
    Penalty,
    Priority,
)
from controlplane.api.protocol.types import (
    CLOSED,
    MAX_CALLS,
    MAX_PARTS,
    ImageUrl,
    ResponseFormat,
    StopSequences,
    Text,
    Tool,
    ToolCall,
    as_parts,
    check_tool_choice,
    conflict,
    encoded,
    expecting,
    image_part,
)

# Types of parts that a message may have; each part has a member of the name of its type.
_PARTS_OF = {
    "system": ("text",),
    "user": ("text", "image_url"),
    "assistant": ("text", "thinking"),
    "tool": ("text", "document"),
}
_PART_TYPES = ("text", "image_url", "thinking", "document")
_PART_RULE = '"text", "image_url", "thinking" or "document"; other content is not passed on to the model'
_CHOICES = {"REQUIRED": "required", "NONE": "none"}


class ToolDocument(TypedDict, total=False):
    """A tool's result as a document; its `id` is for citations, which are not generated."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    data: Required[str | dict[str, Any]]
    id: str | None


class MessagePart(TypedDict, total=False):
    """A part of a message."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Required[Annotated[Literal[*_PART_TYPES], expecting(_PART_RULE)]]  # type: ignore[valid-type]
    text: str
    image_url: ImageUrl
    thinking: str
    document: ToolDocument


class ConversationTurn(TypedDict, total=False):
    """A message of the conversation. `citations` of earlier answers are not passed on to the model."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    role: Required[Literal["system", "user", "assistant", "tool"]]
    content: Annotated[
        Annotated[list[MessagePart], Field(max_length=MAX_PARTS, fail_fast=True)] | None,
        BeforeValidator(as_parts),
    ]
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None
    tool_call_id: Text
    tool_plan: str | None
    citations: Any


class JsonFormat(TypedDict, total=False):
    """`response_format`; `schema` is the name of `json_schema` in version 1 of the protocol."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Required[Literal["text", "json_object"]]
    json_schema: dict[str, Any] | None
    schema: dict[str, Any] | None


class ThinkingSwitch(TypedDict, total=False):
    """`thinking`: a switch of the chat template. Its budget is not enforced; `max_tokens` is."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Required[Literal["enabled", "disabled"]]
    token_budget: Annotated[int, Field(ge=1)] | None


class CitationOptions(TypedDict, total=False):
    """`citation_options`; no citations are generated."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    mode: Annotated[Literal["OFF", "DISABLED"], expecting('"OFF"; citations are not generated')] | None


class CohereChatRequest(Objectives):
    """Body of POST /v2/chat."""

    model: Name
    messages: Annotated[list[ConversationTurn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    stream: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    p: Annotated[float, Field(gt=0, le=1)] | None = None
    k: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stop_sequences: StopSequences | None = None
    logprobs: bool | None = None
    response_format: JsonFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    strict_tools: bool | None = None
    thinking: ThinkingSwitch | None = None

    # Only what the server does anyway is accepted.
    citation_options: CitationOptions | None = None
    safety_mode: (
        Annotated[Literal["OFF"], expecting('"OFF"; write safety instructions into a system message')] | None
    ) = None
    priority: Priority = None

    # Known, not supported.
    documents: None = None

    @property
    def may_call(self) -> bool:
        """Whether the model may call a tool."""
        return bool(self.tools) and self.tool_choice != "NONE"

    @property
    def schema_field(self) -> str:
        """The field that has the schema of the output."""
        is_old = self.response_format is not None and self.response_format.get("schema") is not None
        return "response_format.schema" if is_old else "response_format.json_schema"

    @cached_property
    def chat_messages(self) -> list[dict[str, Any]]:
        """The conversation as chat messages. Raises `conflict`."""
        return [_chat_message(f"messages[{at}]", turn) for at, turn in enumerate(self.messages)]

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        choice = None if self.tool_choice is None else _CHOICES[self.tool_choice]
        check_tool_choice(choice, None, [tool["function"]["name"] for tool in self.tools or ()])
        form: Any = self.response_format or {}
        stated = [name for name in ("json_schema", "schema") if form.get(name) is not None]
        if stated and form["type"] == "text":
            raise conflict(f"response_format.{stated[0]}", 'is for type "json_object" only; make them agree')
        if len(stated) > 1:
            raise conflict("response_format.schema", "differs from json_schema; give one of them")
        # Made here, because a large body is validated in a thread.
        _ = self.chat_messages
        return self

    @property
    def chat(self) -> ChatCompletionRequest:
        """The same request to chat; its parts are valid, because those of this request are."""
        return ChatCompletionRequest.model_construct(
            messages=self.chat_messages,
            tools=[_tool(tool, is_strict=bool(self.strict_tools)) for tool in self.tools or ()] or None,
            tool_choice=None if self.tool_choice is None else _CHOICES[self.tool_choice],
            top_p=self.p,
            top_k=self.k,
            stop=self.stop_sequences,
            response_format=_format(self.response_format),
            chat_template_kwargs=None
            if self.thinking is None
            else {"enable_thinking": self.thinking["type"] == "enabled"},
            **{name: getattr(self, name) for name in _EQUAL_FIELDS},
        )


# Fields that chat has under the same name.
_EQUAL_FIELDS = (
    *("model", "stream", "max_tokens", "temperature", "seed", "frequency_penalty", "presence_penalty"),
    *("logprobs", "service_class", "slo"),
)


def _tool(tool: Tool, *, is_strict: bool) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}} if is_strict else {**tool}


def _format(form: JsonFormat | None) -> ResponseFormat | None:
    if form is None:
        return None
    schema = form.get("json_schema") or form.get("schema")
    if form["type"] == "text" or schema is None:
        return ResponseFormat.model_construct(type=form["type"])
    return ResponseFormat.model_construct(
        type="json_schema", json_schema={"name": "output", "schema": schema}
    )


def _chat_message(path: str, turn: ConversationTurn) -> dict[str, Any]:
    """A turn as a chat message; a tool plan is the reasoning before its calls."""
    role, parts = turn["role"], turn.get("content")
    if not parts and role != "assistant":
        raise conflict(f"{path}.content", "only an assistant message may omit it; add it")
    if role == "tool" and "tool_call_id" not in turn:
        raise conflict(f"{path}.tool_call_id", "a message of a tool needs it; add it")
    checked = list(_checked_parts(f"{path}.content", role, parts or []))
    shown = [_shown_part(field, part) for field, part in checked if part["type"] != "thinking"]
    message: dict[str, Any] = {"role": role, "content": shown or None}
    thoughts = [part["thinking"] for _, part in checked if part["type"] == "thinking"]
    if reasoning := "".join([turn.get("tool_plan") or "", *thoughts]):
        message["reasoning"] = reasoning
    return message | {name: turn[name] for name in ("tool_calls", "tool_call_id") if turn.get(name)}


def _checked_parts(path: str, role: str, parts: list[MessagePart]) -> Iterator[tuple[str, MessagePart]]:
    """Each part with its field. Raises `conflict` for one that the role does not have, or that is empty."""
    for at, part in enumerate(parts):
        kind, field = part["type"], f"{path}[{at}]"
        if kind not in _PARTS_OF[role]:
            allowed = " or ".join(_PARTS_OF[role])
            raise conflict(f"{field}.type", f"a message of role {role} has {allowed}; change it")
        if kind not in part:
            raise conflict(f"{field}.{kind}", f"a part of type {kind} needs it; add it")
        yield field, part


def _shown_part(field: str, part: MessagePart) -> dict[str, Any]:
    """A part as that of a chat message; a document is a text."""
    if part["type"] == "image_url":
        return image_part(part["image_url"]["url"], field)
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    data = part["document"]["data"]
    return {"type": "text", "text": data if isinstance(data, str) else encoded(data, "messages").decode()}
