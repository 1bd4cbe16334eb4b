"""Request bodies: OpenAI's fields, common vLLM fields, and the two fields of Tandem.

Supported fields are typed and range-checked. Fields that cannot change the output are accepted and ignored.
A field declared `None` is known but not supported: only null is accepted (or vLLM's default, as `Priority`
does), and `unserved` names the remedy. Any other field is refused. Imports only `types` and `unserved`, so
that the SDK can import it.
"""

from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from controlplane.api.protocol.types import (
    Ignored,
    IgnoredObject,
    Message,
    ResponseFormat,
    Stops,
    StreamOptions,
    Strict,
    StructuredOutputs,
    Text,
    Tool,
    ToolChoice,
    check_tool_choice,
    conflict,
    expecting,
)
from controlplane.api.protocol.unserved import UNSERVED

HEADER_REQUEST_ID = "x-request-id"
HEADER_ANTHROPIC_ID = "request-id"
HEADER_SERVICE_CLASS = "x-service-class"
HEADER_TOKEN_IDS = "x-token-ids"
HEADER_ROUTER_KEY = "x-tandem-router-key"
HEADER_DECISION = "x-tandem-decision"
HEADER_QUEUE_MS = "x-tandem-queue-ms"
HEADER_PREDICTED_TTFT_MS = "x-tandem-predicted-ttft-ms"
HEADER_RETRY_AFTER_MS = "retry-after-ms"
HEADER_SHOULD_RETRY = "x-should-retry"
RESPONSE_HEADERS = (
    HEADER_REQUEST_ID,
    HEADER_ANTHROPIC_ID,
    HEADER_DECISION,
    HEADER_QUEUE_MS,
    HEADER_PREDICTED_TTFT_MS,
    HEADER_RETRY_AFTER_MS,
    HEADER_SHOULD_RETRY,
    "retry-after",
)
"""Headers of responses that scripts of a web page may read."""

MAX_OBJECTIVE_MS = 86_400_000.0
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_BIASES = 1024
# vLLM's second model runner has room for 128, the model's own stop tokens included; its engine ends at more.
MAX_STOP_TOKENS = 64
MAX_NAME = 256
MAX_CHOICES = 128
MAX_INPUTS = 2048
MAX_LOGPROBS = 20


def _null_for(default: object, value: object) -> object:
    return None if value == default and type(value) is type(default) else value


# vLLM's clients send its default; another value is refused.
Priority = Annotated[None, BeforeValidator(partial(_null_for, 0), json_schema_input_type=Literal[0] | None)]
Padding = Annotated[
    None,
    BeforeValidator(partial(_null_for, "do_not_pad"), json_schema_input_type=Literal["do_not_pad"] | None),
]

OnlyFalse = Annotated[
    None, BeforeValidator(partial(_null_for, False), json_schema_input_type=Literal[False] | None)
]
OnlyTrue = Annotated[
    None, BeforeValidator(partial(_null_for, True), json_schema_input_type=Literal[True] | None)
]
OnlyEmpty = Annotated[
    None,
    BeforeValidator(
        partial(_null_for, []), json_schema_input_type=Annotated[list[Any], Field(max_length=0)] | None
    ),
]
# The default is 1.0, which some clients write as 1.
OnlyOne = Annotated[
    None,
    BeforeValidator(
        lambda value: _null_for(1.0, _null_for(1, value)), json_schema_input_type=Literal[1] | None
    ),
]

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
# Without fail_fast every invalid item of a list would have an error of its own.
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
Milliseconds = Annotated[float, Field(gt=0, le=MAX_OBJECTIVE_MS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class SloFields(Strict):
    """Objectives of one request; they override those of its class."""

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None
    gap_ms: Milliseconds | None = None


class Objectives(Strict):
    """Tandem's own fields, in every body.

    Only token ids come in hundreds of thousands; a body without them has fewer values.
    """

    takes_token_ids: ClassVar[bool] = False

    service_class: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    slo: SloFields | None = None


class Generation(Objectives):
    """Fields that chat and completions share."""

    model: Name
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    # OpenAI's newer name; some clients send both.
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^\d+$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASES),
        ]
        | None
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
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None
    ) = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # Cannot change the output.
    user: Ignored[str] = None
    safety_identifier: Ignored[str] = None
    session_id: Ignored[str] = None

    # Known, not supported; vLLM's defaults are accepted.
    allowed_token_ids: None = None
    bad_words: OnlyEmpty = None
    cache_salt: None = None
    guided_choice: None = None
    guided_grammar: None = None
    guided_json: None = None
    guided_regex: None = None
    kv_transfer_params: None = None
    length_penalty: OnlyOne = None
    logprob_token_ids: None = None
    priority: Priority = None
    prompt_logprobs: None = None
    request_id: None = None
    return_token_ids: OnlyFalse = None
    return_tokens_as_token_ids: OnlyFalse = None
    spaces_between_special_tokens: OnlyTrue = None
    thinking_token_budget: None = None
    truncate_prompt_tokens: None = None
    truncation_side: None = None
    use_beam_search: OnlyFalse = None
    vllm_xargs: None = None

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether the last chunk of a stream carries the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return self.wants_usage_chunk and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    def stated_max_tokens(self) -> int | None:
        """The limit of output tokens that the client states under either name, if any."""
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _shared_rules_hold(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise conflict("max_tokens", "differs from max_completion_tokens; give one of them")
        if self.seed is not None and self.seed + (self.n or 1) > 2**63:
            # vLLM adds the number of the choice to the seed, and its engine ends at 2**63.
            raise conflict("seed", "each choice adds its number to it; seed + n must be at most 2**63")
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options", "needs stream=true; set it or leave this out")
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            raise conflict("structured_outputs", "response_format already constrains the output; give one")
        return self


class ChatCompletionRequest(Generation):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    continue_final_message: bool | None = None

    # Cannot change the output.
    metadata: IgnoredObject = None
    prediction: IgnoredObject = None
    prompt_cache_key: Ignored[str] = None
    prompt_cache_options: IgnoredObject = None
    prompt_cache_retention: Ignored[str] = None
    store: bool | None = None

    # Only the default value is accepted.
    modalities: Annotated[list[Literal["text"]], Field(max_length=8, fail_fast=True)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    verbosity: Literal["medium"] | None = None

    # Known, not supported.
    audio: None = None
    chat_template: None = None
    documents: None = None
    echo: OnlyFalse = None
    function_call: None = None
    functions: None = None
    media_io_kwargs: None = None
    mm_processor_kwargs: None = None
    moderation: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise conflict("top_logprobs", "needs logprobs=true; set it or leave this out")
        names = {tool["function"]["name"] for tool in self.tools or ()}
        choice = self.tool_choice
        check_tool_choice(choice, choice["function"]["name"] if isinstance(choice, dict) else None, names)
        for index, message in enumerate(self.messages):
            if message.get("content") is None and message["role"] != "assistant":
                raise conflict(f"messages[{index}].content", "only an assistant message may omit it; add it")
        return self


def listed(given: str | list[int] | list[str] | list[list[int]]) -> list[str] | list[list[int]]:
    """One text or prompt, or several, as a list."""
    if isinstance(given, str):
        return [given]
    # The items of a list are all tokens, all texts or all lists of tokens.
    return [given] if isinstance(given[0], int) else given


class CompletionRequest(Generation):
    """Body of POST /v1/completions."""

    takes_token_ids = True

    prompt: Annotated[
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)],
        expecting(
            "a string, a list of token ids, or a list of "
            f"1 to {MAX_PROMPTS} strings or non-empty lists of token ids"
        ),
    ]
    # 0 returns the prompt alone, with its log probabilities.
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    # Known, not supported.
    add_special_tokens: OnlyTrue = None
    suffix: None = None

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise conflict("best_of", f"{self.best_of} differs from n={self.n or 1}; {UNSERVED['best_of']}")
        if self.max_tokens == 0 and not self.echo:
            raise conflict(
                "max_tokens", "0 leaves no output; ask for at least 1, or for the prompt by echo=true"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list."""
        return [*listed(self.prompt)]


EmbeddingInputs = Annotated[
    Text
    | Tokens
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)],
    expecting(
        "a non-empty string, a list of token ids, or a list of "
        f"1 to {MAX_INPUTS} non-empty strings or lists of token ids"
    ),
]


class EmbeddingRequest(Objectives):
    """Body of POST /v1/embeddings."""

    takes_token_ids = True

    model: Name
    input: EmbeddingInputs
    # null is accepted: proxies send it if their client stated nothing.
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Ignored[str] = None
    # vLLM's fields. Without them an input that is too long is refused, not truncated.
    truncate_prompt_tokens: Annotated[
        Literal[-1] | Annotated[int, Field(ge=1)] | None,
        expecting("the number of tokens to keep, at least 1, or -1 for as many as the model takes"),
    ] = None
    truncation_side: Literal["left", "right"] | None = None
    # Ids without the special tokens of the model's tokenizer are refused unless they are meant so.
    token_ids: Literal["as-given"] | None = None
    # One of the model's own prompts, such as "query" or "passage" (a sentence-transformers term).
    prompt_name: Name | None = None

    # Known, not supported; vLLM's defaults are accepted.
    add_special_tokens: OnlyTrue = None
    priority: Priority = None
    request_id: None = None

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """The inputs as a list."""
        return listed(self.input)


class CachedTokens(BaseModel):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int = 0


class OutputTokenDetails(BaseModel):
    """Details of the output tokens."""

    reasoning_tokens: int = 0


class Usage(BaseModel):
    """Token counts of a response."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: OutputTokenDetails | None = None


class ErrorObject(BaseModel):
    """The `error` object of every response that is not a success."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
