"""What may a caller say? OpenAI's request bodies, vLLM's well-known extras, and our own two fields.

What is honoured is typed and range-checked. What cannot change the answer is accepted and ignored.
A field declared `None` is known but not served: only null is accepted, and UNSERVED tells the remedy.
Anything else is unknown and refused. Imports nothing of ours but the parts of bodies, so that a client may
import it.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from controlplane.api.protocol.types import (
    Message,
    ResponseFormat,
    Stops,
    StreamOptions,
    Strict,
    StructuredOutputs,
    Text,
    Tool,
    ToolChoice,
    conflict,
    expecting,
)

HEADER_REQUEST_ID = "x-request-id"
HEADER_SERVICE_CLASS = "x-service-class"
HEADER_DECISION = "x-tandem-decision"
HEADER_QUEUE_MS = "x-tandem-queue-ms"
HEADER_PREDICTED_TTFT_MS = "x-tandem-predicted-ttft-ms"
HEADER_RETRY_AFTER_MS = "retry-after-ms"
HEADER_SHOULD_RETRY = "x-should-retry"

MAX_OBJECTIVE_MS = 86_400_000.0
MAX_PROMPTS = 128
MAX_CHOICES = 128
MAX_INPUTS = 2048
MAX_LOGPROBS = 20

UNSERVED = {
    "add_special_tokens": "texts get the model's own; send token ids to choose them",
    "audio": "answers are text; leave it out",
    "best_of": "only one answer per choice is generated; use n",
    "cache_salt": "leave it out",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "guided_json": "use response_format or structured_outputs",
    "guided_regex": "use structured_outputs",
    "input_type": "name one of the model's own prompts in prompt_name",
    "moderation": "leave it out",
    "normalize": "the operator sets it for each embedding model; leave it out",
    "priority": "numbers mean opposite things to different servers; use service_class",
    "request_id": f"send it as the header {HEADER_REQUEST_ID}",
    "suffix": "no model here fills in the middle; leave it out",
    "truncate": "use truncate_prompt_tokens, -1 for what the model takes",
    "truncation_direction": "use truncation_side",
    "vllm_xargs": "leave it out; objectives go into slo",
    "web_search_options": "nothing here searches; leave it out",
}


Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Milliseconds = Annotated[float, Field(gt=0, le=MAX_OBJECTIVE_MS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class SloFields(Strict):
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None


class Objectives(Strict):
    """Our own fields, in every body."""

    service_class: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    slo: SloFields | None = None


class Generation(Objectives):
    """What chat and completions share."""

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    # OpenAI's newer name, for chat; some clients send both with either body.
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^\d+$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # Cannot change the answer.
    user: str | None = None
    safety_identifier: str | None = None

    # Known, not served.
    cache_salt: None = None
    guided_choice: None = None
    guided_grammar: None = None
    guided_json: None = None
    guided_regex: None = None
    priority: None = None
    request_id: None = None
    vllm_xargs: None = None

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return self.wants_usage_chunk and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _shared_rules_hold(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise conflict("max_tokens", "differs from max_completion_tokens; give one of them")
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options", "only allowed with stream=true; leave it out or stream")
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            raise conflict("structured_outputs", "response_format already constrains the answer; give one")
        return self


class ChatCompletionRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    # Cannot change the answer.
    metadata: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    store: bool | None = None

    # Only the value that asks for what happens anyway.
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    verbosity: Literal["medium"] | None = None

    # Known, not served.
    audio: None = None
    function_call: None = None
    functions: None = None
    moderation: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise conflict("top_logprobs", "needs logprobs=true; set it or leave this out")
        names = {tool["function"]["name"] for tool in self.tools or ()}
        if isinstance(self.tool_choice, dict) and self.tool_choice["function"]["name"] not in names:
            raise conflict("tool_choice", "names a function that tools lacks; add it there")
        if self.tool_choice == "required" and not names:
            raise conflict("tool_choice", "requires a call but tools is empty; add a tool")
        for at, message in enumerate(self.messages):
            if message.get("content") is None and message["role"] != "assistant":
                raise conflict(f"messages[{at}].content", "only an assistant message may have none; add it")
        return self


def _listed(given: str | list[int] | list[str] | list[list[int]]) -> list[str] | list[list[int]]:
    if isinstance(given, str):
        return [given]
    # The items of a non-empty list are all tokens, all texts or all lists of tokens.
    return [given] if isinstance(given[0], int) else given


class CompletionRequest(Generation):
    prompt: Annotated[
        str | Tokens | Annotated[list[str] | list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)],
        expecting(
            "a string, a list of token ids, or a list of "
            f"1 to {MAX_PROMPTS} strings or non-empty lists of token ids"
        ),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    # Known, not served.
    suffix: None = None

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise conflict("best_of", f"{self.best_of} is not n={self.n or 1}; {UNSERVED['best_of']}")
        if self.echo and self.logprobs is not None:
            raise conflict("echo", "the prompt has no logprobs here; leave out echo or logprobs")
        if self.echo and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise conflict("echo", "needs prompts as text, these are token ids; send text or leave it out")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Always a list of prompts."""
        return [*_listed(self.prompt)]


class EmbeddingRequest(Objectives):
    model: Annotated[str, Field(min_length=1)]
    input: Annotated[
        Text | Tokens | Annotated[list[Text] | list[Tokens], Field(min_length=1, max_length=MAX_INPUTS)],
        expecting(
            "a non-empty string, a list of token ids, or a list of "
            f"1 to {MAX_INPUTS} non-empty strings or lists of token ids"
        ),
    ]
    # null as in OpenAI's other fields: proxies send it where their caller stated nothing.
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    # vLLM's fields. Without them too long an input is refused, never cut unseen.
    truncate_prompt_tokens: Annotated[
        Literal[-1] | Annotated[int, Field(ge=1)] | None,
        expecting("the tokens to keep, 1 at least, or -1 for as many as the model takes"),
    ] = None
    truncation_side: Literal["left", "right"] | None = None
    # Names one of the model's own prompts, such as "query" or "passage" (sentence-transformers' word).
    prompt_name: Annotated[str, Field(min_length=1)] | None = None
    priority: None = None
    request_id: None = None

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """Always a list of inputs."""
        return _listed(self.input)


class CachedTokens(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class ErrorObject(BaseModel):
    """The `error` of every answer that is not a success."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
