"""What would the predictor have said of an operator's own traffic? Logs replayed in the order of their lines.

A line is JSON with `prompt` (text, or OpenAI's messages), `output_tokens` and `model`; `class`, `tenant`,
`prompt_tokens` and `max_tokens` are optional. Each request is forecast before its answer is shown, and
models are learned on the way as the service would.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.core.clock import Instant
from controlplane.core.request import Kind, PromptFeatures, Request
from controlplane.core.slo import ServiceClass, Slo
from predictors.calibration import Calibration
from predictors.output_length.features import chat_features, prompt_features
from predictors.output_length.learned import LearnedLengths
from predictors.output_length.model import ENOUGH, fit

_CHARACTERS_A_TOKEN = 4
_LONGEST = 4_096
_GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class Logged:
    request: Request
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """Of the last answers of each class: share within the 0.9 quantile; pinball loss, absolute error and bias
    in tokens; drift as `Calibration` says."""

    answers: int
    coverage: Mapping[str, float]
    pinball: Mapping[str, float]
    error: Mapping[str, float]
    bias: Mapping[str, float]
    drift: Mapping[str, float]


def logged(lines: Iterable[str]) -> Iterator[Logged]:
    """Raises ValueError naming the line and what is wrong with it."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _logged(json.loads(line), number)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"line {number}: {type(error).__name__} {error}; a line is a JSON object with prompt "
                    "(text or messages), output_tokens (at least 0) and model"
                ) from error


def _logged(said: Mapping[str, Any], number: int) -> Logged:
    prompt, tokens = said["prompt"], int(said["output_tokens"])
    if tokens < 0:
        raise ValueError(f"output_tokens={tokens}")
    features: PromptFeatures = prompt_features(prompt) if isinstance(prompt, str) else chat_features(prompt)
    guess = len(prompt if isinstance(prompt, str) else json.dumps(prompt)) // _CHARACTERS_A_TOKEN
    request = Request(
        id=f"line-{number}",
        kind=Kind.GENERATE,
        model=str(said["model"]),
        tenant=str(said.get("tenant", "")),
        service_class=ServiceClass(str(said.get("class", "standard")), Slo(), priority=0, sheddable=False),
        slo=Slo(),
        arrival=Instant(0),
        prompt_tokens=int(said.get("prompt_tokens", guess)),
        max_output_tokens=int(said.get("max_tokens", max(_LONGEST, tokens))),
        features=features,
    )
    return Logged(request, tokens)


def replayed(requests: Iterable[Logged], lengths: LearnedLengths) -> int:
    """Forecasts and learns; the number of answers. Raises ValueError if there is none."""
    due = ENOUGH
    count = 0
    for one in requests:
        lengths.forecast(one.request)
        lengths.observe(one.request, one.output_tokens)
        count += 1
        if lengths.examples.seen >= due:
            lengths.swap(fit(lengths.examples.table()))
            due = round(_GROWTH * due)
    if not count:
        raise ValueError("no request in it; give a log of at least one line")
    return count


def report(calibration: Calibration, answers: int) -> Report:
    return Report(
        answers,
        coverage=calibration.coverage(),
        pinball=calibration.pinball(),
        error=calibration.mean_absolute_error(),
        bias=calibration.bias(),
        drift=calibration.drift(),
    )


def learned_from(requests: Iterable[Logged], *, remember: int) -> LearnedLengths:
    """Learns from all at once. Raises ValueError for too few."""
    lengths = LearnedLengths(remember=remember)
    for one in requests:
        lengths.forecast(one.request)
        lengths.observe(one.request, one.output_tokens)
    lengths.swap(fit(lengths.examples.table()))
    return lengths
