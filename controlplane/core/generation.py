"""Messages between the gate and an LLM engine: sampling parameters, prompts and output deltas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from controlplane.core.clock import NO_TIME, Duration, Instant
from controlplane.core.forecast import LengthForecast


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters under OpenAI's names. None leaves the choice to the model's defaults."""

    max_tokens: int
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    is_echoed: bool = False
    structure: Mapping[str, Any] | None = None
    """Structured output: {"type": "json_object"}, {"type": "json_schema", "schema": {…}} or
    {"type": "regex"|"grammar"|"choice", "value": …}."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's sampling defaults that the gate applies, because leases and resumption depend on them.

    `max_tokens` and the penalties are for requests that state none; `max_tokens_limit` bounds every request.
    """

    max_tokens: int | None = None
    max_tokens_limit: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def filled(self, sampling: Sampling, *, max_tokens: int) -> Sampling:
        """`sampling` with this limit, and with the penalties that it leaves to the model."""
        penalties = {
            name: getattr(self, name)
            for name in ("presence_penalty", "frequency_penalty")
            if getattr(sampling, name) is None
        }
        return replace(sampling, max_tokens=max_tokens, **penalties)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of one position: the chosen token, then the requested alternatives."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    token_id: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """Output that one engine step added to sample `index`.

    `finish_reason` is set on the last delta of a sample: "stop", "length", "tool_calls" or "preempted".
    `stop_reason` is the stop string or token id that matched.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """OpenAI's `delta.tool_calls` objects, each with its `index`; their text is not in `text`."""
    reasoning: str = ""
    """Reasoning before the final output; not in `text` either."""
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """On the first delta, if requested: one entry per prompt token, None for the first."""

    def followed_by(self, later: "Delta") -> "Delta":
        """One delta with the output of this one and of the next one of the same sample."""
        return replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            tool_calls=self.tool_calls + later.tool_calls,
            reasoning=self.reasoning + later.reasoning,
            cached_tokens=max(self.cached_tokens, later.cached_tokens),
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A base64 image and the place of the body that it stands in."""

    where: str
    data: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ProcessedImages:
    """The images of a prompt as the engine's processor made them; only the engine reads `content`.

    A span has the first token of an image, the number of its tokens, and the image's digest.
    """

    spans: Sequence[tuple[int, int, int]]
    content: Any = field(repr=False)

    def marked(self, prompt: Sequence[int]) -> list[int]:
        """The prompt with digests for the tokens of images, which are the same for all images."""
        found = list(prompt)
        for first, length, digest in self.spans:
            found[first : first + length] = [digest] * length
        return found


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the API received it; messages and tools are OpenAI's JSON objects.

    With `add_special_tokens` the tokenizer adds its own to those of the template. With `can_merge_system` a
    template that refuses the conversation gets it with all system messages as one, at its head. Once `images`
    are taken out of the messages, parts `{"type": "image"}` mark their places; the processor makes
    `processed` of them.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    template_options: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False
    can_merge_system: bool = False
    images: Sequence[EncodedImage] = ()
    processed: ProcessedImages | None = None


@dataclass(frozen=True, slots=True)
class RenderedImages:
    """Token ids of a conversation with those of its images, and the images."""

    token_ids: Sequence[int]
    images: ProcessedImages


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Most images of a request, and most bytes and pixels of all of them together.

    The engine gets the images once for each of `choices`, and their pixels count as often.
    """

    count: int
    size: int
    pixels: int
    choices: int = 1


@dataclass(frozen=True, slots=True)
class Handoff:
    """State of a request that the gate hands to the engine.

    `resumed_tokens` output tokens are part of the prompt, because the request was preempted and resumes; its
    deadlines count from the original arrival. `rank` includes `fair_queueing_delay`, which depends on its
    tenant.
    """

    rank: int = 0
    fair_queueing_delay: Duration = NO_TIME
    forecast: LengthForecast | None = None
    resumed_tokens: int = 0
    first_token: Instant | None = None
    last_token: Instant | None = None


FIRST_HANDOFF = Handoff()
