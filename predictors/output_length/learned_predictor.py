"""The output-length predictor: forecasts every request, by the trained model or by recent history.

Two forecasts are made of each request: by the model (the shipped prior first, later a model trained on
requests that finished here) and by the empirical quantiles of its class and model. Both are conformally
calibrated per class. The forecast with the lower recent pinball loss is returned, so a poor model is simply
not used.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import Any

import numpy as np

from controlplane.core.forecast import LengthForecast
from controlplane.core.memory_ledger import Floats
from controlplane.core.request import Request
from predictors.calibration import Calibration
from predictors.output_length.checkpoint import Checkpoint
from predictors.output_length.conformal import Conformal
from predictors.output_length.examples import Examples, FeatureRow, feature_row
from predictors.output_length.features import NUMBERS
from predictors.output_length.history_predictor import HistoryQuantiles
from predictors.output_length.quantile_model import LEVELS, LengthModel, prior

_ALL_LEVELS = (0.0, *LEVELS, 1.0)
_LEVELS = np.array(LEVELS)
_MODEL, _HISTORY = 0, 1
# The distribution is extended beyond its outer quantiles by these shares of the distance from the median.
_TAIL_SHARE = 0.35
_HEAD_SHARE = 0.5
# Upper bound of log tokens: e^16 exceeds any context length.
_LONGEST = 16.0
_OPEN_FORECASTS = 4_096
_LOSS_MEMORY = 128
_MEAN_MEMORY = 64
# Initial outcome count of a new model's calibration, so that it moves in small steps: a trained model's
# quantiles come from cross-validation and are nearly calibrated from the start.
_SETTLED = 300


@dataclass(slots=True)
class _Recent:
    """Exponential mean and deviation of the log output tokens of one class and model."""

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
    """Calibration and recent loss of both forecasters for one class, indexed by _MODEL and _HISTORY."""

    conformal: list[Conformal] = field(default_factory=lambda: [Conformal(), Conformal()])
    loss: list[float] = field(default_factory=lambda: [0.0, 0.0])
    outcomes: int = 0

    def best(self) -> int:
        return _HISTORY if self.outcomes and self.loss[_HISTORY] < self.loss[_MODEL] else _MODEL


@dataclass(frozen=True, slots=True)
class _PendingForecast:
    row: FeatureRow
    quantiles_by_forecaster: tuple[Floats | None, Floats | None]
    generation: int


@dataclass(frozen=True, slots=True)
class _HistoryForecast:
    """The calibrated log quantiles of a history, and the tokens at all levels without a limit."""

    log_quantiles: Floats
    tokens: list[float]


class LearnedLengths:
    """Length predictor that learns from finished requests.

    Training runs elsewhere: it reads `examples`, and `swap` installs the result.

    Args:
        max_examples: finished requests kept as training examples.
        use_prior: whether to start from the shipped model, or from history alone.
    """

    def __init__(self, *, max_examples: int = 8_192, use_prior: bool = True) -> None:
        self.calibration = Calibration()
        self.examples = Examples(max_examples)
        self._model: LengthModel | None = prior() if use_prior else None
        self._generation = 0
        self._history = HistoryQuantiles()
        self._recent: dict[tuple[str, str], _Recent] = {}
        self._classes: dict[str, _ClassState] = {}
        self._pending: OrderedDict[str, _PendingForecast] = OrderedDict()
        # Forecasts since the last change of the state. A request whose output outruns its forecast asks again
        # at every token, and outputs end much less often.
        self._current: dict[str, LengthForecast] = {}
        self._histories: dict[tuple[str, str], _HistoryForecast] = {}

    @property
    def model(self) -> LengthModel | None:
        """The installed model; None before the first `swap` without a prior."""
        return self._model

    def forecast(self, request: Request) -> LengthForecast:
        """Calibrated forecast by the better forecaster, clipped at the request's token limit."""
        if request.runs_to_limit:
            return self._history.forecast(request)
        if (found := self._current.get(request.id)) is None:
            if len(self._current) >= _OPEN_FORECASTS:
                self._current.clear()
            found = self._current[request.id] = self._compute(request)
        return found

    def _compute(self, request: Request) -> LengthForecast:
        state = self._classes.get(request.service_class.name) or _ClassState()
        by_history = self._by_history(request, state)
        prefers_history = by_history is not None and (self._model is None or state.best() == _HISTORY)
        by_model = None
        # Only the first forecast of a request is scored, whichever of the two was chosen.
        is_first = request.id not in self._pending
        if is_first or not prefers_history:
            row = self._row(request)
            if self._model is not None:
                by_model = state.conformal[_MODEL].adjusted(self._model.predict(row))
            if is_first:
                quantiles = None if by_history is None else by_history.log_quantiles
                self._pending[request.id] = _PendingForecast(row, (by_model, quantiles), self._generation)
                if len(self._pending) > _OPEN_FORECASTS:
                    self._pending.popitem(last=False)
        if by_history is not None and prefers_history:
            tokens = by_history.tokens
        elif by_model is not None:
            tokens = _tokens(by_model)
        else:
            return self._history.forecast(request)
        limit = float(request.max_output_tokens)
        found = LengthForecast(_ALL_LEVELS, tuple([min(limit, count) for count in tokens]))
        self.calibration.record_forecast(request.id, LEVELS, found.tokens[1:-1])
        return found

    def _by_history(self, request: Request, state: _ClassState) -> _HistoryForecast | None:
        """The forecast by history, the same for all requests of a class and model until the next outcome."""
        key = (request.service_class.name, request.model)
        if (found := self._histories.get(key)) is None:
            logs = self._history.log_quantiles(request, LEVELS)
            if logs is None:
                return None
            adjusted = state.conformal[_HISTORY].adjusted(logs)
            found = self._histories[key] = _HistoryForecast(adjusted, _tokens(adjusted))
        return found

    def _row(self, request: Request) -> FeatureRow:
        recent = self._recent.get((request.service_class.name, request.model)) or _Recent()
        row = feature_row(request, recent.mean, recent.spread)
        if request.features is None and self._model is not None:
            # Only the prompt's token count is known: the other features take their training means.
            row.numbers[: len(NUMBERS)] = self._model.ridge.center[: len(NUMBERS)]
        return row

    def _state_changed(self) -> None:
        self._current.clear()
        self._histories.clear()

    def observe(self, request: Request, output_tokens: int) -> None:
        """Learns the output length of a finished request and scores both forecasts of it."""
        if request.runs_to_limit:
            return
        self._state_changed()
        name = request.service_class.name
        self.calibration.record_outcome(request.id, name, output_tokens)
        self._history.observe(request, output_tokens)
        log_tokens = log(max(1, output_tokens))
        self._recent.setdefault((name, request.model), _Recent()).add(log_tokens)
        stated = self._pending.pop(request.id, None)
        if stated is None:
            return
        self.examples.add(stated.row, log_tokens)
        self._judge(name, stated, log_tokens, log(max(1, request.max_output_tokens)))

    def withdraw(self, request: Request) -> None:
        """Drops the forecasts of a request that did not finish."""
        self._history.withdraw(request)
        self.calibration.discard(request.id)
        self._pending.pop(request.id, None)
        self._current.pop(request.id, None)

    def _judge(self, name: str, stated: _PendingForecast, log_tokens: float, top: float) -> None:
        state = self._classes.setdefault(name, _ClassState())
        by_model, by_history = stated.quantiles_by_forecaster
        # A forecast by a previous model does not calibrate this one.
        if by_model is not None and stated.generation == self._generation:
            state.conformal[_MODEL].observe(by_model, log_tokens, top)
        if by_history is not None:
            state.conformal[_HISTORY].observe(by_history, log_tokens, top)
        if by_model is not None and by_history is not None:
            state.outcomes += 1
            rate = max(1 / state.outcomes, 1 / _LOSS_MEMORY)
            for way, quantiles in ((_MODEL, by_model), (_HISTORY, by_history)):
                loss = pinball(np.exp(np.minimum(quantiles, top)), exp(log_tokens))
                state.loss[way] += rate * (loss - state.loss[way])

    def swap(self, model: LengthModel) -> None:
        """Installs a trained model and resets its calibration and loss in every class."""
        self._model = model
        self._state_changed()
        self._generation += 1
        for state in self._classes.values():
            state.conformal[_MODEL] = Conformal(outcome_count=_SETTLED)
            state.outcomes = 0

    def calibration_state(self) -> dict[str, Any]:
        """Learned state apart from model and examples, as JSON values, for `Checkpoint.calibration`."""
        return {
            "recent": [[*key, r.seen, r.mean, r.square] for key, r in self._recent.items()],
            "conformal": [
                [name, way, c.outcome_count, c.covered, c.offsets.tolist()]
                for name, state in self._classes.items()
                for way, c in enumerate(state.conformal)
            ],
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores examples, model and state from a checkpoint."""
        self.examples.extend(checkpoint.table)
        if checkpoint.model is not None:
            self.swap(checkpoint.model)
        self._state_changed()
        calibration = checkpoint.calibration or {}
        for class_name, model, *recent in calibration.get("recent", ()):
            self._recent[class_name, model] = _Recent(*recent)
        for name, way, seen, covered, offsets in calibration.get("conformal", ()):
            state = self._classes.setdefault(name, _ClassState())
            state.conformal[way] = Conformal(np.array(offsets), seen, covered)

    def out_of_coverage(self) -> dict[str, bool]:
        """Per class: whether too many outputs recently exceeded the 0.9 quantile, so that forecasts widen."""
        return {name: state.conformal[state.best()].is_under_covered for name, state in self._classes.items()}


def pinball(quantiles: Floats, tokens: float) -> float:
    """Pinball loss of quantiles [levels], averaged over LEVELS, in their unit."""
    missed = tokens - quantiles
    return float(np.maximum(_LEVELS * missed, (_LEVELS - 1) * missed).mean())


def _tokens(log_quantiles: Floats) -> list[float]:
    """Tokens at all levels, at least 1, extended beyond the outermost quantiles."""
    lowest = log_quantiles[0] - _HEAD_SHARE * (log_quantiles[4] - log_quantiles[0])
    longest = log_quantiles[-1] + _TAIL_SHARE * (log_quantiles[-1] - log_quantiles[4])
    logs = np.concatenate(([lowest], log_quantiles, [longest]))
    tokens: list[float] = np.exp(np.minimum(np.maximum(logs, 0.0), _LONGEST)).tolist()
    return tokens
