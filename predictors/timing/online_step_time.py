"""Learns the time of an engine step online, and from it the present times per step and per prompt token.

The model is `t = c0 + c1 decodes + c2 KV cells + c3 prompt tokens`, fitted by `online_least_squares` on
relative errors from a prior for the device and model. Errors beyond the Huber threshold are down-weighted, so
a stall has little effect. Steps that overlap embedding work train the model only while half of them take
less than predicted; all of them measure by what factor they are longer. An engine that reports no steps is
timed at the gate: exponential means of the gap between two tokens and of the prefill time per prompt token,
each observation clipped to within a factor of four of the mean.
"""

from collections import deque
from math import sqrt
from statistics import median
from typing import ClassVar, NamedTuple

import numpy as np

from controlplane.core.clock import NO_TIME, Duration
from controlplane.core.engine_reports import StepCost
from controlplane.core.pool_view import Pace
from predictors.calibration import TimeCalibration
from predictors.timing.online_least_squares import OnlineLeastSquares, Row, dot

_CLIP_FACTOR = 4.0
_DECAY = 0.998
# Scales of the four terms that make all coefficients of similar size.
_UNITS = (1.0, 16.0, 8_192.0, 256.0)
# Deviation of the prior, relative to its value.
_PRIOR_DEVIATION = 2.0
# In typical errors (Huber 1964).
_HUBER_THRESHOLD = 1.5
_ERROR_WINDOW = 64
_MIN_STEPS = 16
_RECENT_STEPS = 8
# So many short ones of the recent steps beside embedding work show that the model expects too much.
_SHORT_STEPS = 4
_SHIFT, _SHIFTS = 0.15, 2.0
# Weight of earlier observations that remains after a detected shift.
_KEPT_AFTER_SHIFT = 0.005
_MIN_TYPICAL_ERROR = 0.02
_MIN_COEFFICIENT = 1e-4
# Window of the mean stretch and of the shortest step, in steps.
_STRETCH_STEPS = 64
OBSERVATIONS = 64
"""Number of observations in the exponential means of what is timed at the gate."""
_PASS_DECAY = 1.0 - 1.0 / 64
_PRIOR_PASS_SECONDS = 0.1


class StepWork(NamedTuple):
    """Work of one engine step: prompt tokens prefilled, sequences decoded, KV cells read by them."""

    prefill_tokens: int
    decodes: int
    cells: int

    def terms(self) -> Row:
        """Scaled regressors of the step-time model."""
        step, decodes, cells, prefill = _UNITS
        return [1.0 / step, self.decodes / decodes, self.cells / cells, self.prefill_tokens / prefill]


# Used if neither device nor model is known; seconds.
_DEFAULT_PRIOR = StepCost(step=0.01, decode=1e-4, cell=1e-7, prompt_token=1e-4)


class StepTime:
    """Online model of the step time of one engine, in seconds.

    A prediction is never below a tenth of the fixed cost per step. If the median error of the last 8 steps
    leaves the usual range, earlier observations are almost entirely discarded, because device or model has
    changed.
    """

    def __init__(self, prior: StepCost | None = None) -> None:
        known = prior or _DEFAULT_PRIOR
        seconds = (known.step, known.decode, known.cell, known.prompt_token)
        self._fit = OnlineLeastSquares(
            [s * unit for s, unit in zip(seconds, _UNITS, strict=True)],
            decay=_DECAY,
            least=_MIN_COEFFICIENT,
        )
        self._errors: deque[float] = deque(maxlen=_ERROR_WINDOW)
        self._typical_error = 0.2
        self.seen = 0
        self.calibration = TimeCalibration()
        """Of the steps that trained the model."""
        self.largest_tokens = 0
        """Most tokens of a step, prefilled and decoded."""

    def predict(self, work: StepWork) -> float:
        """Expected seconds of a step with this work."""
        return self._predicted(work.terms())

    def _predicted(self, terms: Row) -> float:
        return max(dot(terms, self._fit.costs), 0.1 * self._fit.costs[0], 1e-6)

    def quantile(self, work: StepWork, level: float) -> float:
        """Quantile of the seconds of a step, from the relative errors of the last 64 steps."""
        if len(self._errors) < _MIN_STEPS:
            return self.predict(work)
        return self.predict(work) * (1 + float(np.quantile(self._errors, level)))

    @property
    def per_prompt_token(self) -> float:
        """Seconds per prompt token."""
        return self._fit.costs[3] / _UNITS[3]

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per step, decoded sequence, KV cell and prompt token."""
        return tuple(cost / unit for cost, unit in zip(self._fit.costs, _UNITS, strict=True))

    @property
    def relative_errors(self) -> list[float]:
        """Observed over predicted time, minus 1, of the last 64 steps since the last lasting change."""
        return list(self._errors)

    def observe(self, work: StepWork, took: float) -> None:
        """Learns from a step that took `took` seconds."""
        fit, terms = self._fit, work.terms()
        predicted = self._predicted(terms)
        ratio = took / predicted
        self.calibration.record(predicted, took)
        self.seen += 1
        if (tokens := work.prefill_tokens + work.decodes) > self.largest_tokens:
            self.largest_tokens = tokens
        self._errors.append(ratio - 1)
        if self.seen % _RECENT_STEPS == 0:
            self._detect_shift()
        error = clipped(ratio, 1.0) - 1
        terms = [term / predicted for term in terms]
        precisions = [1 / (_PRIOR_DEVIATION * belief) ** 2 for belief in fit.beliefs]
        typical = self._typical_error**2
        threshold = _HUBER_THRESHOLD * sqrt(typical + fit.prediction_variance(terms, precisions))
        weight = min(1.0, threshold / max(abs(error), 1e-12)) / typical
        fit.observe(terms, 1 + error, weight=weight, precisions=precisions)

    def _detect_shift(self) -> None:
        """Discards most of the fit after a lasting change; otherwise updates the typical error."""
        errors = list(self._errors)
        middle = median(errors)
        latest = median(errors[-_RECENT_STEPS:])
        if abs(latest) > _SHIFT + _SHIFTS * self._typical_error:
            self._fit.keep(_KEPT_AFTER_SHIFT)
            self._errors.clear()
        else:
            self._typical_error = max(
                _MIN_TYPICAL_ERROR, 1.4826 * median([abs(error - middle) for error in errors])
            )


class StepReports:
    """Times of a step and of a prompt token of an engine, from the engine's step reports."""

    def __init__(self, prior: StepCost | None = None) -> None:
        self.steps = StepTime(prior)
        self._has_prior = prior is not None
        self._decode_work = StepWork(0, 0, 0)
        self._reported = 0
        self._stretch = 1.0
        self._steps = self._all_seconds = self._prefill_seconds = self._prefill_squares = 0.0
        self._waited_seconds = 0.0
        # At first a pass is taken to delay the steps by its whole time.
        self._delayed_seconds = self._pass_seconds = _PRIOR_PASS_SECONDS
        self._full_steps: deque[Duration] = deque(maxlen=_STRETCH_STEPS)
        # Whether each of the last steps beside embedding work was shorter than predicted.
        self._are_short: deque[bool] = deque(maxlen=_RECENT_STEPS)

    @property
    def reports_steps(self) -> bool:
        """Whether enough steps were reported to use their model."""
        return self._reported >= _MIN_STEPS

    @property
    def own_step(self) -> Duration | None:
        """Predicted time of the next decode-only step without concurrent embedding work.

        At most the median of the last 64 steps. None until enough steps were reported.
        """
        if not self.reports_steps:
            return None
        # An overestimate would shrink the embedding share to almost nothing; embeddings would then never
        # finish, and no step without them would ever correct the estimate. The shortest step would be no
        # bound: the reports of two steps may be read at the same time.
        return min(_duration(self._decoding()), Duration(round(median(self._full_steps))))

    @property
    def longest_step(self) -> Duration:
        """The longest of the last 64 steps, concurrent embedding work included; 0 before any."""
        return max(self._full_steps, default=NO_TIME)

    def predicted_token_gap(self, level: float) -> Duration | None:
        """Quantile of the gap between two tokens of a request.

        It includes concurrent embedding work and the time that the engine paced itself on purpose. None until
        enough steps were reported.
        """
        if not self.reports_steps:
            return None
        return _duration(self.steps.quantile(self._decode_work, level) * self._stretch)

    def observe_work(
        self,
        work: StepWork,
        took: Duration,
        *,
        waited: Duration = NO_TIME,
        is_alone: bool = True,
    ) -> None:
        """Learns from one step reported by the engine.

        Args:
            work: what the step computed.
            took: duration of the step.
            waited: part of `took` in which the engine paced itself on purpose.
            is_alone: whether no embedding work ran at the same time.
        """
        predicted = self.steps.predict(work)
        # Under asynchronous scheduling a delay overlaps with the step in flight.
        busy = max(Duration(took - waited), min(took, _duration(predicted)))
        self._decode_work = StepWork(0, work.decodes, work.cells)
        self._full_steps.append(busy)
        self._reported += 1
        if is_alone or (not waited and self._shows_overestimate(is_short=took / 1e9 < predicted)):
            self.steps.observe(work, busy / 1e9)
        if not is_alone:
            # Bounded, because steps beside passes without a cost count too, and no such pass lets them fade.
            delayed = self._delayed_seconds + busy / 1e9 - predicted
            self._delayed_seconds = min(max(0.0, delayed), 2.0 * self._pass_seconds)
        stretch = 1.0 if is_alone else max(1.0, took / 1e9 / predicted)
        prefill = work.prefill_tokens * self.steps.per_prompt_token
        self._record_prefill(min(busy / 1e9, prefill), busy / 1e9)
        self._waited_seconds = _DECAY * self._waited_seconds + waited / 1e9
        self._stretch += (clipped(stretch, self._stretch) - self._stretch) / _STRETCH_STEPS

    def observe_pass(self, predicted: Duration) -> None:
        """Learns that an embedding pass of this predicted time, begun while the engine ran, has ended."""
        self._pass_seconds = _PASS_DECAY * self._pass_seconds + predicted / 1e9
        self._delayed_seconds *= _PASS_DECAY

    @property
    def pass_delay(self) -> float:
        """Seconds by which each predicted second of embedding passes delays the steps, from 0 to 1.

        A mean over 64 passes. It is 1 where they take turns with the steps, and less where they run at the
        same time. Time for which the engine waited on purpose is no delay.
        """
        return min(1.0, self._delayed_seconds / self._pass_seconds)

    def _shows_overestimate(self, *, is_short: bool) -> bool:
        """Whether a step beside embeddings, no shorter than alone, shows that the model expects too much.

        A single one does not: of two reports that are read at the same time the second one took no time.
        """
        self._are_short.append(is_short)
        return is_short and sum(self._are_short) >= _SHORT_STEPS

    def _record_prefill(self, prefill: float, took: float) -> None:
        self._steps = _DECAY * self._steps + 1
        self._all_seconds = _DECAY * self._all_seconds + took
        self._prefill_seconds = _DECAY * self._prefill_seconds + prefill
        self._prefill_squares = _DECAY * self._prefill_squares + prefill**2

    @property
    def prefill_share(self) -> float:
        """Share of recent step time spent on prefill."""
        return self._prefill_seconds / self._all_seconds if self._all_seconds else 0.0

    @property
    def waited_share(self) -> float:
        """Share of recent time, of steps and waits, for which the engine waited on purpose."""
        whole = self._all_seconds + self._waited_seconds
        return self._waited_seconds / whole if whole else 0.0

    @property
    def prefill_deviation(self) -> float:
        """Standard deviation of the prefill time per step, in seconds."""
        if not self._steps:
            return 0.0
        mean = self._prefill_seconds / self._steps
        return sqrt(max(0.0, self._prefill_squares / self._steps - mean**2))

    def _estimate(self) -> Pace | None:
        """The pace by the step-time model; None without reports and without a prior."""
        if not (self.reports_steps or self._has_prior):
            return None
        step, token = self._decoding(), self.steps.per_prompt_token
        return Pace(_duration(step * self._stretch), _duration(token * self._stretch))

    def _decoding(self) -> float:
        return self.steps.predict(self._decode_work)


class ObservedPace(StepReports):
    """Pace of an engine: from the gaps between tokens, or from step reports once there are any.

    `prior` is the cost of a step, if known.
    """

    is_timed_by_tokens: ClassVar[bool] = True

    def __init__(self, prior: StepCost | None = None) -> None:
        super().__init__(prior)
        self._gaps = 0
        self._step = 0.0
        self._prefills = 0
        self._per_token = 0.0
        self._weight = 0.0

    @property
    def pace(self) -> Pace | None:
        """The present pace; None while nothing is known. A part that was never observed counts as zero."""
        if self.reports_steps or (self._gaps == 0 and self._prefills == 0):
            return self._estimate()
        return Pace(Duration(round(self._step)), Duration(round(self._per_token)))

    def pace_of(self, model: str) -> Pace | None:
        """Same as `pace`: one engine serves one model."""
        return self.pace

    def observe_step(self, took: Duration) -> None:
        """Learns from the gap between two tokens of one request."""
        self._gaps += 1
        # An arithmetic mean at first, so that the first observation does not dominate.
        rate = max(1.0 / OBSERVATIONS, 1.0 / self._gaps)
        self._step += rate * (clipped(took, self._step) - self._step)

    def observe_prefill(self, prompt_tokens: int, took: Duration) -> None:
        """Learns from the time to the first token after `prompt_tokens` tokens."""
        if prompt_tokens <= 0:
            return
        self._prefills += 1
        rate = max(1.0 / OBSERVATIONS, 1.0 / self._prefills)
        self._weight += rate * (prompt_tokens - self._weight)
        share = min(1.0, rate * prompt_tokens / self._weight)
        seen = max(0.0, took - self._step) / prompt_tokens
        self._per_token += share * (clipped(seen, self._per_token) - self._per_token)


class ReportedPace(StepReports):
    """Pace of an engine that reports its own; before the first report, the prior.

    Timing at the gate is impossible there, because the gate does not see when a request starts.
    """

    is_timed_by_tokens: ClassVar[bool] = False

    def __init__(self, prior: StepCost | None = None) -> None:
        super().__init__(prior)
        self.pace = self._estimate()

    def pace_of(self, model: str) -> Pace | None:
        """Same as `pace`: one engine serves one model."""
        return self.pace

    def observe_step(self, took: Duration) -> None:
        """Does nothing: the engine reports its steps."""

    def observe_prefill(self, prompt_tokens: int, took: Duration) -> None:
        """Does nothing: the engine reports its steps."""


def _duration(seconds: float) -> Duration:
    return Duration(round(seconds * 1e9))


def clipped(value: float, present: float) -> float:
    """`value` within a factor of four of `present`, or any if that is not positive."""
    if present <= 0.0:
        return value
    return min(max(value, present / _CLIP_FACTOR), present * _CLIP_FACTOR)
