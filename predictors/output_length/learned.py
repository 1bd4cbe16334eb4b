"""How long will the answer be? By what the prompt says, or by recent history, whichever proves better.

Rule: two forecasts are made of each request: by the model (first one learned from public prompts, later
one learned from the requests that finished here) and by the last answers of its class and model. Both are
kept calibrated, class by class; the one whose pinball loss was lower lately is given out. So the worst
that a useless model can do is to be passed over.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import Any

import numpy as np

from controlplane.core.forecast import LengthForecast
from controlplane.core.memory import Floats
from controlplane.core.request import Request
from predictors.calibration import Calibration
from predictors.output_length.checkpoint import Checkpoint
from predictors.output_length.conformal import Conformal
from predictors.output_length.examples import Examples, FeatureRow, feature_row
from predictors.output_length.features import NUMBERS
from predictors.output_length.history import HistoryQuantiles
from predictors.output_length.model import LEVELS, LengthModel, prior

_ALL_LEVELS = (0.0, *LEVELS, 1.0)
_LEVELS = np.array(LEVELS)
_MODEL, _HISTORY = 0, 1
# Nothing is known of the last percent; the span of what is known goes on that much further.
_TAIL_SHARE = 0.35
_HEAD_SHARE = 0.5
# e^16 tokens: more than any context holds.
_LONGEST = 16.0
_OPEN_FORECASTS = 4_096
_LOSS_MEMORY = 128
_MEAN_MEMORY = 64
# Forecasts by history need this many answers of their class and model, or of their model.
_ENOUGH_HISTORY = 20
# A learned model's levels are those of prompts that it had not seen, so they start out right.
_SETTLED = 300


@dataclass(slots=True)
class _Recent:
    """Mean and spread of log tokens of the last answers of one class and model."""

    seen: int = 0
    mean: float = 5.0
    square: float = 25.64

    def add(self, log_tokens: float) -> None:
        self.seen += 1
        rate = max(1 / self.seen, 1 / _MEAN_MEMORY)
        self.mean += rate * (log_tokens - self.mean)
        self.square += rate * (log_tokens**2 - self.square)

    @property
    def spread(self) -> float:
        return sqrt(max(0.0, self.square - self.mean**2))


@dataclass(slots=True)
class _ClassState:
    """How each of the two ways does for one class."""

    conformal: list[Conformal] = field(default_factory=lambda: [Conformal(), Conformal()])
    loss: list[float] = field(default_factory=lambda: [0.0, 0.0])
    judged: int = 0

    def best(self) -> int:
        return _HISTORY if self.judged and self.loss[_HISTORY] < self.loss[_MODEL] else _MODEL


@dataclass(frozen=True, slots=True)
class _PendingForecast:
    row: FeatureRow
    by: tuple[Floats | None, Floats | None]
    generation: int


class LearnedLengths:
    """A `LengthPredictor`. `examples` is what the next model may learn from; `swap` puts it in force."""

    def __init__(self, *, remember: int = 8_192, use_prior: bool = True) -> None:
        self.calibration = Calibration()
        self.examples = Examples(remember)
        self._model: LengthModel | None = prior() if use_prior else None
        self._generation = 0
        self._history = HistoryQuantiles(enough=_ENOUGH_HISTORY)
        self._recent: dict[tuple[str, str], _Recent] = {}
        self._classes: dict[str, _ClassState] = {}
        self._pending: OrderedDict[str, _PendingForecast] = OrderedDict()

    @property
    def model(self) -> LengthModel | None:
        return self._model

    def forecast(self, request: Request) -> LengthForecast:
        if request.runs_to_limit:
            return self._history.forecast(request)
        recent = self._recent.get((request.service_class.name, request.model)) or _Recent()
        row = feature_row(request, recent.mean, recent.spread)
        if request.features is None and self._model is not None:
            # Nothing is known of the prompt but its tokens: it is taken to be like all others.
            row.numbers[: len(NUMBERS)] = self._model.ridge.center[: len(NUMBERS)]
        judged = self._classes.get(request.service_class.name) or _ClassState()
        by_model = None
        if self._model is not None:
            by_model = judged.conformal[_MODEL].adjusted(self._model.predict(row))
        if (known := self._history.log_quantiles(request, LEVELS)) is not None:
            known = judged.conformal[_HISTORY].adjusted(known)
        # A request is judged by what was first said of it.
        self._pending.setdefault(request.id, _PendingForecast(row, (by_model, known), self._generation))
        if len(self._pending) > _OPEN_FORECASTS:
            self._pending.popitem(last=False)
        prefers_history = by_model is None or judged.best() == _HISTORY
        chosen = known if known is not None and prefers_history else by_model
        if chosen is None:
            return self._history.forecast(request)
        found = _forecast(chosen, request.max_output_tokens)
        self.calibration.stated(request.id, LEVELS, found.tokens[1:-1])
        return found

    def observe(self, request: Request, output_tokens: int) -> None:
        if request.runs_to_limit:
            return
        name = request.service_class.name
        self.calibration.happened(request.id, name, output_tokens)
        self._history.observe(request, output_tokens)
        log_tokens = log(max(1, output_tokens))
        self._recent.setdefault((name, request.model), _Recent()).add(log_tokens)
        stated = self._pending.pop(request.id, None)
        if stated is None:
            return
        self.examples.add(stated.row, log_tokens)
        self._judge(name, stated, log_tokens, log(max(1, request.max_output_tokens)))

    def withdraw(self, request: Request) -> None:
        self._history.withdraw(request)
        self.calibration.withdrawn(request.id)
        self._pending.pop(request.id, None)

    def _judge(self, name: str, stated: _PendingForecast, log_tokens: float, top: float) -> None:
        judged = self._classes.setdefault(name, _ClassState())
        by_model, by_history = stated.by
        # What a former model said teaches nothing about this one.
        if by_model is not None and stated.generation == self._generation:
            judged.conformal[_MODEL].observe(by_model, log_tokens, top)
        if by_history is not None:
            judged.conformal[_HISTORY].observe(by_history, log_tokens, top)
        if by_model is not None and by_history is not None:
            judged.judged += 1
            rate = max(1 / judged.judged, 1 / _LOSS_MEMORY)
            for way, said in ((_MODEL, by_model), (_HISTORY, by_history)):
                loss = pinball(np.exp(np.minimum(said, top)), exp(log_tokens))
                judged.loss[way] += rate * (loss - judged.loss[way])

    def swap(self, model: LengthModel) -> None:
        """The new model's forecasts are calibrated afresh and judged anew; those of the old still count as
        history of what was said."""
        self._model = model
        self._generation += 1
        for judged in self._classes.values():
            judged.conformal[_MODEL] = Conformal(seen=_SETTLED)
            judged.judged = 0

    def standing(self) -> dict[str, Any]:
        """All but model and examples that an answer teaches, as JSON."""
        return {
            "recent": [[*key, r.seen, r.mean, r.square] for key, r in self._recent.items()],
            "conformal": [
                [name, way, c.seen, c.covered, c.offsets.tolist()]
                for name, judged in self._classes.items()
                for way, c in enumerate(judged.conformal)
            ],
        }

    def restore(self, kept: Checkpoint) -> None:
        """Takes up where an earlier life ended."""
        self.examples.extend(kept.table)
        if kept.model is not None:
            self.swap(kept.model)
        standing = kept.standing or {}
        for class_name, model, *recent in standing.get("recent", ()):
            self._recent[class_name, model] = _Recent(*recent)
        for name, way, seen, covered, offsets in standing.get("conformal", ()):
            judged = self._classes.setdefault(name, _ClassState())
            judged.conformal[way] = Conformal(np.array(offsets), seen, covered)

    def out_of_coverage(self) -> dict[str, bool]:
        """By class: whether too many answers lately passed the 0.9 quantile, so that forecasts widen."""
        return {name: judged.conformal[judged.best()].is_out for name, judged in self._classes.items()}


def pinball(quantiles: Floats, tokens: float) -> float:
    """Mean over LEVELS, in the unit of the quantiles."""
    missed = tokens - quantiles
    return float(np.maximum(_LEVELS * missed, (_LEVELS - 1) * missed).mean())


def _forecast(log_quantiles: Floats, max_tokens: int) -> LengthForecast:
    """In tokens, from 1 to the request's own limit; the ends reach beyond the outermost levels."""
    lowest = log_quantiles[0] - _HEAD_SHARE * (log_quantiles[4] - log_quantiles[0])
    longest = log_quantiles[-1] + _TAIL_SHARE * (log_quantiles[-1] - log_quantiles[4])
    tokens = np.exp(np.clip(np.concatenate(([lowest], log_quantiles, [longest])), 0.0, _LONGEST))
    tokens = np.minimum(tokens, max_tokens)
    return LengthForecast(_ALL_LEVELS, tuple(tokens.tolist()))
