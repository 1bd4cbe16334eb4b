"""New."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controlplane.core.clock import NO_TIME, Duration, Instant
from controlplane.core.forecast import LengthForecast


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to generate, in OpenAI's names. `None` leaves the choice to the model's own defaults."""

    max_tokens: int
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
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
    structure: Mapping[str, Any] | None = None
    """What the output must conform to: {"type": "json_object"} or {"type": "json_schema", "schema": {…}},
    {"type": "regex"|"grammar"|"choice", "value": …}."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position: the chosen token first, then the alternatives asked for."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine step added to sample `index`. `finish_reason` is set on its last delta:
    "stop", "length", "tool_calls" or "preempted". `stop_reason` is the stop string or token id
    that matched."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """OpenAI's `delta.tool_calls` objects, each with its `index`; their text is not in `text`."""
    reasoning: str = ""
    """What the model thinks before it answers; not in `text` either."""
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """On the first delta, when asked for: one entry a prompt token, `None` for the first."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the API received it; messages and tools are OpenAI's JSON objects."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the gate knows of a request when it hands it over. `done` tokens of its answer are part of the
    prompt by now: it was preempted and resumes, with its promise as old as it is. Its tenant's `turn` puts it
    back by so much; `rank` tells that already."""

    rank: int = 0
    turn: Duration = NO_TIME
    forecast: LengthForecast | None = None
    done: int = 0
    first_token: Instant | None = None
    last_token: Instant | None = None


FIRST_HANDOFF = Handoff()
