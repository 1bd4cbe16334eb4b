"""Bodies of POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol, mapped onto chat.

As strict as all other bodies. Imports only `requests` and `types`.
"""

from collections.abc import Iterable, Iterator
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
)
from controlplane.api.protocol.types import (
    CLOSED,
    MAX_PARTS,
    FunctionName,
    IgnoredObject,
    ResponseFormat,
    Stated,
    StopSequences,
    Text,
    Value,
    as_parts,
    check_tool_choice,
    conflict,
    encoded,
    expecting,
    image_part,
    named_tool,
)

# Members of a block without which it means nothing.
_REQUIRED = {
    "text": ("text",),
    "image": ("source",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
}
_OTHERS = "other content is not passed on to the model"
_BLOCK_TYPES = f'"text", "image", "tool_use", "tool_result" or "thinking"; {_OTHERS}'
_SOURCE = '"base64"; nothing is fetched for a client and no file is stored, so send the image itself'
# Begins the first line of Claude Code's system prompt. The line has a hash that differs between requests, so
# nothing after it would be found in the prefix cache.
_BILLING_HEADER = "x-anthropic-billing-header"
_Blocks = Annotated[list[Stated[Value]], Field(max_length=MAX_PARTS, fail_fast=True)]
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Claude Code sends the second with every request that may think, and has no option to leave it out.
_KEEPS_ALL: tuple[dict[str, Any], ...] = (
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)


def _null_if_it_keeps_all(value: Any) -> Any:
    return None if value in _KEEPS_ALL else value


class TextBlock(TypedDict, total=False):
    """A text. `cache_control` is ignored: prefix caching is automatic."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Required[Annotated[Literal["text"], expecting(f'"text"; {_OTHERS}')]]
    text: Required[str]
    cache_control: Any
    citations: Any


class ImageSource(TypedDict):
    """The data of an image, in base64."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Annotated[Literal["base64"], expecting(_SOURCE)]
    media_type: Literal["image/png", "image/jpeg", "image/webp"]
    data: str


class ResultBlock(TypedDict, total=False):
    """A block of a tool's result: a text or an image."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Required[Annotated[Literal["text", "image"], expecting(f'"text" or "image"; {_OTHERS}')]]
    text: str
    source: ImageSource
    cache_control: Any
    citations: Any


class ContentBlock(TypedDict, total=False):
    """A block of a message: text, an image, a tool's use or result, or the thinking before them."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Required[Annotated[Literal[*_REQUIRED], expecting(_BLOCK_TYPES)]]  # type: ignore[valid-type]
    text: str
    source: ImageSource
    citations: Any
    id: Text
    name: Text
    input: dict[str, Any]
    caller: Any
    tool_use_id: Text
    content: Annotated[_Blocks[ResultBlock], BeforeValidator(as_parts)]
    is_error: bool
    thinking: str
    signature: str
    data: str
    cache_control: Any


class InputMessage(TypedDict):
    """One turn of the conversation."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    role: Literal["user", "assistant", "system"]
    content: Annotated[_Blocks[ContentBlock], Field(min_length=1), BeforeValidator(as_parts)]


class ClientTool(TypedDict, total=False):
    """A tool that the client runs."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Annotated[Literal["custom"], expecting('"custom"; server tools are not supported')]
    name: Required[FunctionName]
    description: str
    input_schema: Required[dict[str, Any]]
    strict: bool
    cache_control: Any
    eager_input_streaming: Any
    # Only the value of a tool that the model sees and calls at once is accepted.
    defer_loading: Literal[False]
    allowed_callers: list[Literal["direct"]]


class ToolUseChoice(TypedDict, total=False):
    """`tool_choice`."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Required[Literal["auto", "any", "tool", "none"]]
    name: str
    disable_parallel_tool_use: bool


class Thinking(TypedDict, total=False):
    """`thinking`: a switch of the chat template. Its budget is not enforced; `max_tokens` is."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Required[Literal["enabled", "adaptive", "disabled"]]
    budget_tokens: int
    display: Literal["summarized", "omitted"] | None


class SchemaFormat(TypedDict):
    """A schema for the output."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(TypedDict, total=False):
    """`output_config`."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    effort: str | None
    format: SchemaFormat | None


class MessagesChat(ChatCompletionRequest, defer_build=True):
    """The chat that a request maps onto, never validated; it may have system messages at any position."""


class CountTokensRequest(Objectives):
    """Body of POST /v1/messages/count_tokens: the fields that make the prompt."""

    model: Name
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Annotated[_Blocks[TextBlock], BeforeValidator(as_parts)] | None = None
    tools: Annotated[list[Stated[ClientTool]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    # Only the default is accepted.
    speed: Literal["standard"] | None = None
    context_management: Annotated[
        None, BeforeValidator(_null_if_it_keeps_all, json_schema_input_type=dict[str, Any] | None)
    ] = None

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        choice: Any = self.tool_choice or {}
        if (choice.get("type") == "tool") != ("name" in choice):
            raise conflict("tool_choice.name", 'is for type "tool" and only for it; make them agree')
        check_tool_choice(choice.get("type"), choice.get("name"), {tool["name"] for tool in self.tools or ()})
        uses: set[str] = set()
        for at, message in enumerate(self.messages):
            for place, block in enumerate(message["content"]):
                path = f"messages[{at}].content[{place}]"
                _check_members(path, block)
                for inner, part in enumerate(block.get("content") or ()):
                    _check_members(f"{path}.content[{inner}]", part)
                if block["type"] == "tool_use":
                    uses.add(block["id"])
                elif block["type"] == "tool_result" and block["tool_use_id"] not in uses:
                    raise conflict(f"{path}.tool_use_id", "no earlier tool_use has this id; send that first")
        # Made here, because a large body is validated in a thread.
        if all(made["role"] == "system" for made in self.chat_messages):
            raise conflict("messages", "they have no block but thinking; add one of text or of a tool")
        return self

    @cached_property
    def chat_messages(self) -> list[dict[str, Any]]:
        """The conversation as chat messages."""
        parts = _system_parts(block["text"] for block in self.system or ())
        system = [{"role": "system", "content": parts}] if parts else []
        return system + [
            made
            for at, message in enumerate(self.messages)
            for made in _chat_messages(f"messages[{at}].content", message)
        ]

    @property
    def chat(self) -> MessagesChat:
        """The same prompt to chat; its parts are valid, because those of this request are."""
        choice: Any = self.tool_choice
        config: Any = self.output_config or {}
        last, form = self.chat_messages[-1], config.get("format")
        named = named_tool(choice["name"]) if choice and "name" in choice else None
        return MessagesChat.model_construct(
            model=self.model,
            messages=self.chat_messages,
            tools=[{"type": "function", "function": _function(tool)} for tool in self.tools or ()] or None,
            tool_choice=named or (_CHOICES[choice["type"]] if choice else None),
            parallel_tool_calls=False if choice and choice.get("disable_parallel_tool_use") else None,
            reasoning_effort=config.get("effort"),
            chat_template_kwargs={"enable_thinking": self.thinking["type"] != "disabled"}
            if self.thinking
            else None,
            include_reasoning=self.thinking is None or self.thinking.get("display") != "omitted",
            # The output continues a last message of the assistant.
            continue_final_message=(last["role"] == "assistant" and "tool_calls" not in last) or None,
            response_format=form
            and ResponseFormat.model_construct(
                type="json_schema", json_schema={"name": "output", "schema": form["schema"]}
            ),
            service_class=self.service_class,
            slo=self.slo,
        )


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: StopSequences | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**63)] | None = None

    # Cannot change the output.
    diagnostics: IgnoredObject = None
    metadata: IgnoredObject = None
    service_tier: Literal["auto", "standard_only"] | None = None

    # Known, not supported.
    container: None = None
    inference_geo: None = None
    mcp_servers: None = None

    @property
    def chat(self) -> MessagesChat:
        """The same request to chat."""
        return super().chat.model_copy(
            update={
                "max_completion_tokens": self.max_tokens,
                "stop": self.stop_sequences,
                **{name: getattr(self, name) for name in ("stream", "temperature", "top_p", "top_k")},
            }
        )


def _function(tool: ClientTool) -> dict[str, Any]:
    stated = {key: tool[key] for key in ("name", "description", "strict") if key in tool}
    return stated | {"parameters": tool["input_schema"]}


def _check_members(path: str, block: ContentBlock | ResultBlock) -> None:
    for name in _REQUIRED[block["type"]]:
        if name not in block:
            raise conflict(f"{path}.{name}", f"a block of type {block['type']} needs it; add it")


def _part(field: str, block: ContentBlock | ResultBlock) -> dict[str, Any]:
    """A text or an image as a part of a chat message."""
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    source = block["source"]
    return image_part(f"data:{source['media_type']};base64,{source['data']}", field)


def _system_parts(texts: Iterable[str]) -> list[dict[str, str]]:
    """The parts of a system message, without a billing header and without empty texts."""
    kept = (
        text.partition("\n")[2].lstrip("\n") if text.startswith(_BILLING_HEADER) else text for text in texts
    )
    return [{"type": "text", "text": text} for text in kept if text]


def _chat_messages(field: str, message: InputMessage) -> Iterator[dict[str, Any]]:
    """One chat message, and before it one for each result of a tool.

    Chat templates take no images in a tool's result, so its images are those of the message, as in vLLM.
    """
    made: dict[str, Any] = {"role": message["role"], "content": []}
    thoughts: list[str] = []
    for at, block in enumerate(message["content"]):
        match block["type"]:
            case "text" if message["role"] == "system":
                made["content"] += _system_parts([block["text"]])
            case "text" | "image":
                made["content"].append(_part(f"{field}[{at}]", block))
            case "thinking":
                thoughts.append(block["thinking"])
            case "tool_use":
                function = {"name": block["name"], "arguments": encoded(block["input"], "messages").decode()}
                call = {"id": block["id"], "type": "function", "function": function}
                made.setdefault("tool_calls", []).append(call)
            case "tool_result":
                parts = [
                    _part(f"{field}[{at}].content[{inner}]", part)
                    for inner, part in enumerate(block.get("content") or ())
                ]
                texts = [part for part in parts if part["type"] == "text"]
                made["content"] += [part for part in parts if part["type"] != "text"]
                yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": texts}
    if thoughts:
        # Joined once: a message has up to 4,096 blocks, and each copy holds the interpreter lock.
        made["reasoning"] = "".join(thoughts)
    if len(made) > 2 or made["content"]:
        yield made | {"content": made["content"] or None}
