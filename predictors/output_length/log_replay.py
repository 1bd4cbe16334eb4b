"""Replays an operator's request log through the length predictor, to train it or to score its forecasts.

A line of the log is a JSON object with `prompt` (text or OpenAI chat messages), `output_tokens` and `model`;
`class`, `tenant`, `prompt_tokens` and `max_tokens` are optional. Each request is forecast before its output
length is learned, and models are trained on the way, as in the service.
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
from predictors.output_length.learned_predictor import LearnedLengths
from predictors.output_length.quantile_model import ENOUGH, fit

_CHARACTERS_A_TOKEN = 4
_LONGEST = 4_096
_GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class Logged:
    """One request of the log and its output length."""

    request: Request
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """Scores of the last outputs of each class.

    Coverage is the share within the 0.9 quantile; pinball loss, absolute error and bias are in tokens; drift
    is as in `Calibration.drift`.
    """

    answers: int
    coverage: Mapping[str, float]
    pinball: Mapping[str, float]
    error: Mapping[str, float]
    bias: Mapping[str, float]
    drift: Mapping[str, float]


def parse_log(lines: Iterable[str]) -> Iterator[Logged]:
    """Parses the lines of a log; raises ValueError with the line number and the fault."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _logged(json.loads(line), number)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"line {number}: {type(error).__name__} {error}; a line is a JSON object with prompt "
                    "(text or messages), output_tokens (at least 0) and model"
                ) from error


def _logged(entry: Mapping[str, Any], number: int) -> Logged:
    prompt, tokens = entry["prompt"], int(entry["output_tokens"])
    if tokens < 0:
        raise ValueError(f"output_tokens={tokens}")
    features: PromptFeatures = prompt_features(prompt) if isinstance(prompt, str) else chat_features(prompt)
    guess = len(prompt if isinstance(prompt, str) else json.dumps(prompt)) // _CHARACTERS_A_TOKEN
    request = Request(
        id=f"line-{number}",
        kind=Kind.GENERATE,
        model=str(entry["model"]),
        tenant=str(entry.get("tenant", "")),
        service_class=ServiceClass(str(entry.get("class", "standard")), Slo(), priority=0, sheddable=False),
        slo=Slo(),
        arrival=Instant(0),
        prompt_tokens=int(entry.get("prompt_tokens", guess)),
        max_output_tokens=int(entry.get("max_tokens", max(_LONGEST, tokens))),
        features=features,
    )
    return Logged(request, tokens)


def replay(requests: Iterable[Logged], lengths: LearnedLengths) -> int:
    """Forecasts and learns each request in order; returns their number, raises ValueError if it is 0."""
    due = ENOUGH
    count = 0
    for entry in requests:
        lengths.forecast(entry.request)
        lengths.observe(entry.request, entry.output_tokens)
        count += 1
        if lengths.examples.seen >= due:
            lengths.swap(fit(lengths.examples.table()))
            due = round(_GROWTH * due)
    if not count:
        raise ValueError("the log holds no request; give a log of at least one line")
    return count


def report(calibration: Calibration, answers: int) -> Report:
    """Collects the scores of a replay of `answers` requests."""
    return Report(
        answers,
        coverage=calibration.coverage(),
        pinball=calibration.pinball(),
        error=calibration.mean_absolute_error(),
        bias=calibration.bias(),
        drift=calibration.drift(),
    )


def train_from(requests: Iterable[Logged], *, max_examples: int) -> LearnedLengths:
    """Trains a predictor on all requests at once; raises ValueError if there are too few."""
    lengths = LearnedLengths(max_examples=max_examples)
    for entry in requests:
        lengths.forecast(entry.request)
        lengths.observe(entry.request, entry.output_tokens)
    lengths.swap(fit(lengths.examples.table()))
    return lengths
