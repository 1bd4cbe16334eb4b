"""Bodies and answers of POST /tokenize and /detokenize, in vLLM's shapes.

As strict as all other bodies. Imports only `requests` and `types`.
"""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from controlplane.api.protocol.requests import MAX_MESSAGES, MAX_TOOLS, Name, Objectives
from controlplane.api.protocol.types import Described, Message, Tool, ToolChoice, conflict

# Fields that only a conversation has.
_OF_CHATS = (
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    *("tools", "tool_choice", "reasoning_effort"),
)


class TokenizeRequest(Objectives):
    """Body of POST /tokenize: a text in `prompt`, or a conversation in `messages`."""

    # Required only if several chat models are served, as in vLLM.
    model: Name | None = None
    return_token_strs: bool | None = None
    # By default on for a text and off for a conversation, as in vLLM.
    add_special_tokens: bool | None = None
    prompt: str | None = None

    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: str | None = None

    # Known, not supported.
    chat_template: None = None
    media_io_kwargs: None = None
    mm_processor_kwargs: None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise conflict("prompt", "give either prompt or messages")
        if self.messages is None and (
            stated := [name for name in _OF_CHATS if getattr(self, name) is not None]
        ):
            raise conflict(stated[0], "belongs to a request with messages; leave it out")
        return self


class DetokenizeRequest(Objectives):
    """Body of POST /detokenize."""

    takes_token_ids = True

    model: Name | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class TokenizeResponse(Described):
    """Answer of /tokenize; `count` equals `usage.prompt_tokens` of the same request."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Described):
    """Answer of /detokenize."""

    prompt: str
