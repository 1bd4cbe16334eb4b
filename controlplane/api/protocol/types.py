"""OpenAI's objects inside request bodies: messages, tools and formats, as strict as the bodies themselves.

Imports nothing of the control plane.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal, NotRequired, Required, Self, TypeVar

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

MAX_STOPS = 16
# The engine gets the stop sequences with each of up to 128 choices: 4.7 MB would be 600 MB.
MAX_STOP_CHARACTERS = 1_024
MAX_PARTS = 4096
MAX_CALLS = 512


Value = TypeVar("Value")


def _dropped(_: object) -> None:
    return None


Ignored = Annotated[Value | None, AfterValidator(_dropped)]
"""A field that is checked and then dropped: a request that waits keeps its body."""


class AnyObject(TypedDict):
    """An object of any members, which are not built: 99,000 strings take 4 ms instead of 13."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]


IgnoredObject = Ignored[AnyObject]


class Strict(BaseModel):
    """Base of all request objects: exact types, no unknown fields, no infinities.

    A server builds the validators with the schemas of /openapi.json while its models load; clients need none.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True, defer_build=True)


class Described(BaseModel):
    """Base of the answers, which are only described in /openapi.json."""

    model_config = ConfigDict(defer_build=True)


OPEN = ConfigDict(strict=True, extra="allow")
CLOSED = ConfigDict(strict=True, extra="forbid")


def expecting(expected: str) -> WrapValidator:
    """Replaces pydantic's errors, one per branch of a union, by one that names what is expected."""

    def check(value: Any, validate: Any) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError("shape", "expected {expected}", {"expected": expected}) from None

    return WrapValidator(check)


def conflict(field: str, message: str) -> PydanticCustomError:
    """The error of a field that contradicts another one."""
    return PydanticCustomError("conflict", "{rule}", {"rule": message, "field": field})


def encoded(value: object, field: str) -> bytes:
    """`value` of a body as JSON. Raises `conflict` for an integer that most JSON parsers cannot hold."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise conflict(field, "has an integer of more than 64 bits; send it as a string") from None


def check_tool_choice(choice: object, named: str | None, tools: Collection[str]) -> None:
    """Raises `conflict` if `tools` lacks the `named` function, or is empty where a call is required."""
    if named is not None and named not in tools:
        raise conflict("tool_choice", "names a function that is not in tools; add it there")
    if choice in ("required", "any") and not tools:
        raise conflict("tool_choice", "requires a call but tools is empty; add a tool")


def as_parts(value: Any) -> Any:
    """The parts of a content, which may be written as one string."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def stated(value: Any) -> Any:
    """An object without its null members."""
    if not isinstance(value, dict):
        return value
    return {name: member for name, member in value.items() if member is not None}


Stated = Annotated[Value, BeforeValidator(stated)]
"""An object that a client may send back with every member that its release knows, most of them null."""
Text = Annotated[str, Field(min_length=1)]
FunctionName = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopSequences = Annotated[list[StopSequence], Field(max_length=MAX_STOPS, fail_fast=True)]
Stops = Annotated[
    StopSequence | StopSequences | None,
    expecting(
        f"a string of 1 to {MAX_STOP_CHARACTERS:,} characters or a list of at most {MAX_STOPS} of them"
    ),
]


class StreamOptions(Strict):
    """Options of a streamed response."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    # vLLM's field: every chunk carries the usage so far. Needs include_usage.
    continuous_usage_stats: bool | None = None


class JsonSchema(TypedDict, total=False):
    """A named schema of `response_format`."""

    __pydantic_config__ = OPEN  # type: ignore[misc]
    name: Required[Text]
    schema: dict[str, Any]


class ResponseFormat(Strict):
    """OpenAI's constraint of the output format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise conflict("json_schema", 'is for type "json_schema" and only for it; make them agree')
        return self


class StructuredOutputs(Strict):
    """vLLM's field: exactly one constraint."""

    json_: dict[str, Any] | Annotated[str, Field(min_length=1)] | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = None
    grammar: Text | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(value is not None for value in self.__dict__.values()) != 1:
            raise conflict("", "give exactly one of json, regex, choice, grammar, json_object")
        return self


class ContentPart(TypedDict):
    """One text part of a message. `cache_control` is ignored: prefix caching is automatic."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Literal["text"]
    text: str
    cache_control: NotRequired[IgnoredObject]


class ImageUrl(TypedDict):
    """The data URL of an image."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    url: str
    detail: NotRequired[Literal["auto"] | None]


class ImagePart(TypedDict):
    """One image of a user's message, for a model that takes images."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Literal["image_url"]
    image_url: ImageUrl
    cache_control: NotRequired[IgnoredObject]


def image_part(url: str, field: str) -> dict[str, Any]:
    """An image of another protocol as a part of a chat message; errors name it by `field`."""
    return {"type": "image_url", "image_url": {"url": url}, "field": field}


class CalledFunction(TypedDict):
    """Name and JSON arguments of a function call."""

    __pydantic_config__ = OPEN  # type: ignore[misc]
    name: str
    arguments: str


class ToolCall(TypedDict):
    """A tool call of an earlier assistant message."""

    __pydantic_config__ = OPEN  # type: ignore[misc]
    id: str
    type: Literal["function"]
    function: CalledFunction


def only_parts(*kinds: str) -> WrapValidator:
    """Replaces pydantic's errors about a list of content parts by one that names the first faulty one."""

    def check(value: Any, validate: Any) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            parts = value if isinstance(value, list) else ()
            types = ((at, part.get("type")) for at, part in enumerate(parts) if isinstance(part, dict))
            at, found = next(((at, kind) for at, kind in types if kind not in kinds), (0, None))
            shape = " or ".join(f'{{"type": "{kind}", …}}' for kind in kinds)
            expected = f"a string or a list of 1 to {MAX_PARTS:,} {shape} parts"
            if isinstance(found, str):
                rule = f"part {at} is of type {found:.40}; only text and images are passed on to a model"
                raise conflict("", rule) from None
            if fault := _part_fault(error):
                raise conflict("", fault) from None
            raise PydanticCustomError("shape", "expected {expected}", {"expected": expected}) from None

    return WrapValidator(check)


def _part_fault(error: ValidationError) -> str | None:
    """The fault within a part, if that is what is wrong."""
    fault = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
    # After the branch of the union come the number of the part, in a tagged union its type, and the field.
    branch, *place = fault["loc"]
    if "tagged-union" in str(branch):
        del place[1:2]
    if len(place) < 2:
        return None
    rules = {
        "dict_type": "should be an object",
        "extra_forbidden": "unknown field; remove it",
        "missing": "missing; add it",
    }
    rule = rules.get(fault["type"], fault["msg"].replace("Input should be", "should be", 1))
    return f"part {place[0]}: {'.'.join(map(str, place[1:]))}: {rule}"


_Part = Annotated[ContentPart | ImagePart, Field(discriminator="type")]
Content = Annotated[
    str | Annotated[list[_Part], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)] | None,
    only_parts("text", "image_url"),
]


class Message(TypedDict, total=False):
    """A chat message.

    The fields from `refusal` on are accepted because clients (OpenAI's, LiteLLM, OpenRouter) send earlier
    responses back; lm-evaluation-harness sends `type`. As in vLLM, no chat template reads them.
    """

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: Content
    name: str | None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None
    tool_call_id: str | None
    reasoning: str | None
    reasoning_content: str | None
    refusal: str | None
    annotations: Ignored[list[Any]]
    audio: None
    function_call: None
    provider_specific_fields: IgnoredObject
    reasoning_details: Ignored[list[Any]]
    thinking_blocks: Ignored[list[Any]]
    type: Literal["text", "message"] | None


class FunctionSpec(TypedDict, total=False):
    """A function that the model may call."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    name: Required[FunctionName]
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class Tool(TypedDict):
    """A tool of the request."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Literal["function"]
    function: FunctionSpec


class _Named(TypedDict):
    name: str


class NamedTool(TypedDict):
    """A `tool_choice` that requires one function."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Literal["function"]
    function: _Named


def named_tool(name: str) -> dict[str, Any]:
    """The `tool_choice` that requires this function."""
    return {"type": "function", "function": {"name": name}}


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    expecting('"none", "auto", "required" or {"type": "function", "function": {"name": …}}'),
]
