"""Bodies of POST /v1/responses and /v1/responses/input_tokens: OpenAI's stateless subset, mapped onto chat.

The whole conversation is in `input`; nothing is stored. As strict as all other bodies. Imports only
`requests`, `responses_items` and `types`.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Required, Self

import orjson
from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import TypedDict

from controlplane.api.protocol.requests import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatCompletionRequest,
    Name,
    Objectives,
)
from controlplane.api.protocol.responses_items import InputItem, as_items, check_items, messages_of
from controlplane.api.protocol.types import (
    CLOSED,
    FunctionName,
    Ignored,
    IgnoredObject,
    ResponseFormat,
    Strict,
    Text,
    check_tool_choice,
    conflict,
    encoded,
    expecting,
    named_tool,
)

_LOGPROBS = "message.output_text.logprobs"
_MAX_METADATA = 16


class FunctionTool(TypedDict, total=False):
    """A function tool, whose members are those of chat's `function`."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Required[
        Annotated[
            Literal["function"], expecting('"function"; built-in tools are not supported, offer functions')
        ]
    ]
    name: Required[FunctionName]
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None
    defer_loading: Literal[False]
    allowed_callers: None
    output_schema: Any


class NamedFunction(TypedDict):
    """A `tool_choice` that requires one function."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Literal["function"]
    name: str


class TextFormat(TypedDict, total=False):
    """`text.format`; members but `type` belong to json_schema."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Required[Literal["text", "json_object", "json_schema"]]
    name: Text
    schema: dict[str, Any]
    strict: bool | None
    description: str | None


class TextOptions(Strict):
    """`text`: the format of the output. Only the default verbosity is accepted."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Strict):
    """`reasoning`: the effort for the chat template. The reasoning is returned whole, not as a summary."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    # Only the defaults are accepted; all reasoning in `input` reaches the chat template.
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ObfuscationOptions(Strict):
    """`stream_options`; padding against traffic analysis is not sent."""

    include_obfuscation: bool | None = None


class InputTokensRequest(Objectives):
    """Body of POST /v1/responses/input_tokens: the fields that make the prompt."""

    model: Name
    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(as_items),
    ]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | NamedFunction,
            expecting('"none", "auto", "required" or {"type": "function", "name": …}'),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    # Only the value of a stateless response is accepted.
    truncation: Literal["disabled"] | None = None

    # Known, not supported.
    conversation: None = None
    personality: None = None
    previous_response_id: None = None

    @model_validator(mode="after")
    def _prompt_rules_hold(self) -> Self:
        choice = self.tool_choice
        names = {tool["name"] for tool in self.tools or ()}
        check_tool_choice(choice, choice["name"] if isinstance(choice, dict) else None, names)
        chosen = self.text.format if self.text else None
        if chosen and chosen["type"] == "json_schema" and not {"name", "schema"} <= chosen.keys():
            raise conflict("text.format", 'of type "json_schema" needs name and schema; add them')
        check_items(self.input)
        # Here, because a large body is validated in a thread.
        _ = self.messages
        return self

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat messages."""
        return [*_instructions(self.instructions), *messages_of(self.input)]

    @property
    def chat(self) -> ChatCompletionRequest:
        """The same request to chat; its parts are valid, because those of this one are."""
        choice = self.tool_choice
        return ChatCompletionRequest.model_construct(
            model=self.model,
            messages=self.messages,
            tools=[{"type": "function", "function": _function(tool)} for tool in self.tools or ()] or None,
            tool_choice=named_tool(choice["name"]) if isinstance(choice, dict) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_response_format(self.text),
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            service_class=self.service_class,
            slo=self.slo,
        )


class ResponsesRequest(InputTokensRequest):
    """Body of POST /v1/responses."""

    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[str], Field(max_length=_MAX_METADATA, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: ObfuscationOptions | None = None
    # Returned as it is.
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=_MAX_METADATA),
        ]
        | None
    ) = None

    # Returned as it is; it cannot change the output.
    user: Annotated[str, Field(max_length=512)] | None = None
    # Cannot change the output. Codex sends client_metadata with every request.
    client_metadata: IgnoredObject = None
    safety_identifier: Ignored[str] = None
    prompt_cache_key: Ignored[str] = None
    prompt_cache_options: IgnoredObject = None
    prompt_cache_retention: Ignored[str] = None

    # Only the value of a stateless, immediate response is accepted.
    store: bool | None = None
    background: bool | None = None
    service_tier: Literal["auto", "default"] | None = None

    # Known, not supported.
    access_programs: None = None
    context_management: None = None
    image: None = None
    max_tool_calls: None = None
    moderation: None = None
    # Not as those above: in other bodies the name has other meanings.
    prompt: Any = None

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        if self.store:
            raise conflict("store", "responses are not stored; send false, and all earlier items in input")
        if self.background:
            raise conflict("background", "a response ends with its connection; leave it out")
        if self.prompt is not None:
            raise conflict("prompt", "stored prompts are not supported; send the text itself in input")
        # Here, because a large body is validated in a thread.
        _ = self.echo
        return self

    @cached_property
    def echo(self) -> dict[str, orjson.Fragment]:
        """The tools and the format as the response repeats them, encoded."""
        empty = {"description": None, "parameters": None, "strict": None}
        form = (self.text.format if self.text else None) or {"type": "text"}
        tools = encoded([empty | tool for tool in self.tools or ()], "tools")
        text = encoded({"format": form, "verbosity": "medium"}, "text.format")
        return {"tools": orjson.Fragment(tools), "text": orjson.Fragment(text)}

    @property
    def chat(self) -> ChatCompletionRequest:
        """The same request to chat."""
        wants_logprobs = self.top_logprobs is not None or _LOGPROBS in (self.include or ())
        return super().chat.model_copy(
            update={
                "max_completion_tokens": self.max_output_tokens,
                "logprobs": wants_logprobs or None,
                "top_logprobs": self.top_logprobs if wants_logprobs else None,
                **{name: getattr(self, name) for name in ("temperature", "top_p", "stream")},
            }
        )


def _function(tool: FunctionTool) -> Any:
    given: Mapping[str, Any] = tool
    return {key: given[key] for key in ("name", "description", "parameters", "strict") if key in given}


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    chosen = text.format if text else None
    if chosen is None:
        return None
    schema = {"name": chosen["name"], "schema": chosen["schema"]} if chosen["type"] == "json_schema" else None
    return ResponseFormat.model_construct(type=chosen["type"], json_schema=schema)


def _instructions(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []
