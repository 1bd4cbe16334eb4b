"""How fast does an owner work now? The time of one engine step, learned online from what steps report.

Rule (`t = c0 + c1 decodes + c2 cells + c3 prompt tokens`): `least_squares` on relative errors, starting from
what is known beforehand of device and model; an error far outside the usual ones counts no more than one at
their edge, so that a stall moves little.
Steps beside which embeddings were computed teach nothing of the engine; they tell how much longer a step
then is. An engine that reports no steps is timed by its tokens: exponentially weighted means of the gap
between two tokens and of the time a prompt token takes, clipped to a factor of four around the present one.
"""

from collections import deque
from collections.abc import Iterable
from math import sqrt
from statistics import median
from typing import NamedTuple

import numpy as np

from controlplane.core.clock import NO_TIME, Duration
from controlplane.core.ports import Embedder, StepCost
from controlplane.core.request import Owner
from controlplane.core.view import Pace
from predictors.timing.online_least_squares import OnlineLeastSquares, Row, dot

_CLIP_FACTOR = 4.0
_DECAY = 0.998
# Natural sizes of the four terms, so that all coefficients are of a like size.
_UNITS = (1.0, 16.0, 8_192.0, 256.0)
# What is known beforehand may be wrong by so many times itself: one deviation.
_PRIOR_DEVIATION = 2.0
# Errors beyond this many usual ones count as if they were there (Huber).
_HUBER_THRESHOLD = 1.5
_ERROR_WINDOW = 64
_MIN_STEPS = 16
_RECENT_STEPS = 8
_SHIFT, _SHIFTS = 0.15, 2.0
# The part that still counts of what was seen before everything changed.
_KEPT_AFTER_SHIFT = 0.005
_MIN_TYPICAL_ERROR = 0.02
_MIN_COEFFICIENT = 1e-4
# How many steps the usual stretch, and the shortest one, look back over.
_STRETCH_STEPS = 64
# Full batches of passages: what a token costs while there is much to do.
_PASSAGES, _PASSAGE_TOKENS = 32, 512


class StepWork(NamedTuple):
    """What one engine step did: prompt tokens read, sequences that got a token, KV cells that they read."""

    prefill_tokens: int
    decodes: int
    cells: int

    def terms(self) -> Row:
        one, decodes, cells, prefill = _UNITS
        return [1.0 / one, self.decodes / decodes, self.cells / cells, self.prefill_tokens / prefill]


# Where neither device nor model is known.
_DEFAULT_PRIOR = StepCost(step=0.01, decode=1e-4, cell=1e-7, prompt_token=1e-4)


class StepTime:
    """Coefficients of one engine, in seconds. Nothing is predicted below a tenth of the fixed cost."""

    def __init__(self, prior: StepCost | None = None) -> None:
        known = prior or _DEFAULT_PRIOR
        seconds = (known.step, known.decode, known.cell, known.prompt_token)
        self._fit = OnlineLeastSquares(
            [s * unit for s, unit in zip(seconds, _UNITS, strict=True)],
            decay=_DECAY,
            least=_MIN_COEFFICIENT,
        )
        self._errors: deque[float] = deque(maxlen=_ERROR_WINDOW)
        self._usual = 0.2
        self.seen = 0

    def predict(self, work: StepWork) -> float:
        return self._predicted(work.terms())

    def _predicted(self, terms: Row) -> float:
        return max(dot(terms, self._fit.costs), 0.1 * self._fit.costs[0], 1e-6)

    def quantile(self, work: StepWork, level: float) -> float:
        """By the relative errors of the last steps."""
        if len(self._errors) < _MIN_STEPS:
            return self.predict(work)
        return self.predict(work) * (1 + float(np.quantile(self._errors, level)))

    @property
    def per_prompt_token(self) -> float:
        return self._fit.costs[3] / _UNITS[3]

    def observe(self, work: StepWork, took: float) -> None:
        """`took` in seconds."""
        terms = work.terms()
        predicted = self._predicted(terms)
        self.seen += 1
        self._errors.append(took / predicted - 1)
        if self.seen % _RECENT_STEPS == 0:
            self._detect_shift()
        missed = _clipped(took / predicted, 1.0) - 1
        terms = [term / predicted for term in terms]
        doubts = [1 / (_PRIOR_DEVIATION * one) ** 2 for one in self._fit.beliefs]
        edge = _HUBER_THRESHOLD * sqrt(self._usual**2 + self._fit.prediction_variance(terms, doubts))
        weight = min(1.0, edge / max(abs(missed), 1e-12)) / self._usual**2
        self._fit.observe(terms, 1 + missed, weight=weight, doubts=doubts)

    def _detect_shift(self) -> None:
        """If the latest steps all went another way than was thought, little of what was learned holds."""
        errors = list(self._errors)
        middle = median(errors)
        latest = median(errors[-_RECENT_STEPS:])
        if abs(latest) > _SHIFT + _SHIFTS * self._usual:
            self._fit.keep(_KEPT_AFTER_SHIFT)
            self._errors.clear()
        else:
            self._usual = max(_MIN_TYPICAL_ERROR, 1.4826 * median(abs(error - middle) for error in errors))


class StepReports:
    """What an engine's reports of its steps tell, seen from the gate."""

    def __init__(self, prior: StepCost | None = None) -> None:
        self.steps = StepTime(prior)
        self._has_prior = prior is not None
        self._decode_work = StepWork(0, 0, 0)
        self._stretch = 1.0
        self._steps = self._all_seconds = self._lost_seconds = self._lost_squares = 0.0
        self._wholes: deque[Duration] = deque(maxlen=_STRETCH_STEPS)

    @property
    def reports_steps(self) -> bool:
        return self.steps.seen >= _MIN_STEPS

    @property
    def own_step(self) -> Duration | None:
        """The next step without prompts, and with nothing embedded beside it; no longer than the shortest of
        the last ones was as a whole. None until enough steps were reported."""
        if not self.reports_steps:
            return None
        # Thought too long it would hold embeddings to next to nothing, so that they never stop, and no step
        # without them would ever correct it.
        return min(_duration(self._decoding()), *self._wholes)

    def foretold_gap(self, level: float) -> Duration | None:
        """Between two tokens of an answer, beside what is embedded; None until enough steps were reported."""
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
        ceded: Duration | None = None,
    ) -> None:
        """A whole step as the engine reports it, of which it `waited` on purpose; not `is_alone` if
        embeddings were computed meanwhile, which were to make it no more than `ceded` longer."""
        busy = Duration(max(0, took - waited))
        self._decode_work = StepWork(0, work.decodes, work.cells)
        self._wholes.append(busy)
        if is_alone:
            self.steps.observe(work, busy / 1e9)
        stretch = 1.0 if is_alone else max(1.0, took / 1e9 / self.steps.predict(work))
        lost = work.prefill_tokens * self.steps.per_prompt_token
        if not is_alone and ceded is not None:
            lost += max(0.0, (busy - ceded) / 1e9 - self.steps.predict(work))
        self._record_loss(min(busy / 1e9, lost), busy / 1e9)
        self._stretch += (_clipped(stretch, self._stretch) - self._stretch) / _STRETCH_STEPS

    def _record_loss(self, lost: float, took: float) -> None:
        self._steps = _DECAY * self._steps + 1
        self._all_seconds = _DECAY * self._all_seconds + took
        self._lost_seconds = _DECAY * self._lost_seconds + lost
        self._lost_squares = _DECAY * self._lost_squares + lost**2

    @property
    def lost_share(self) -> float:
        """Of the time of the last steps, what went to reading prompts, and to embeddings beyond what was
        ceded to them; less than all."""
        return self._lost_seconds / self._all_seconds if self._all_seconds else 0.0

    @property
    def lost_deviation(self) -> float:
        """Of that, in seconds a step."""
        if not self._steps:
            return 0.0
        mean = self._lost_seconds / self._steps
        return sqrt(max(0.0, self._lost_squares / self._steps - mean**2))

    def _estimate(self) -> Pace | None:
        """By the steps reported; before there are enough of them, by what was told of the engine."""
        if not (self.reports_steps or self._has_prior):
            return None
        step, token = self._decoding(), self.steps.per_prompt_token
        return Pace(_duration(step * self._stretch), _duration(token * self._stretch))

    def _decoding(self) -> float:
        return self.steps.predict(self._decode_work)


class ObservedPace(StepReports):
    """`memory` is how many observations the token timing looks back over."""

    def __init__(self, *, memory: int = 64, prior: StepCost | None = None) -> None:
        super().__init__(prior)
        self._rate = 1.0 / memory
        self._gaps = 0
        self._step = 0.0
        self._prefills = 0
        self._per_token = 0.0
        self._weight = 0.0

    @property
    def pace(self) -> Pace | None:
        """None while nothing is known. What was never observed, nor told, is taken to cost nothing."""
        if self.reports_steps or (self._gaps == 0 and self._prefills == 0):
            return self._estimate()
        return Pace(Duration(round(self._step)), Duration(round(self._per_token)))

    def pace_of(self, model: str) -> Pace | None:
        return self.pace

    def observe_step(self, took: Duration) -> None:
        """The time between two tokens of one answer."""
        self._gaps += 1
        # A plain mean at first, so that the first observation does not weigh for long.
        rate = max(self._rate, 1.0 / self._gaps)
        self._step += rate * (_clipped(took, self._step) - self._step)

    def observe_prefill(self, prompt_tokens: int, took: Duration, *, model: str | None = None) -> None:
        """The time from start to first token, or to the vectors of that many tokens."""
        if prompt_tokens <= 0:
            return
        self._prefills += 1
        rate = max(self._rate, 1.0 / self._prefills)
        self._weight += rate * (prompt_tokens - self._weight)
        share = min(1.0, rate * prompt_tokens / self._weight)
        seen = max(0.0, took - self._step) / prompt_tokens
        self._per_token += share * (_clipped(seen, self._per_token) - self._per_token)


class ModelPaces(ObservedPace):
    """Of embedding models, each computed by a process of its own; `pace` is that of all their work."""

    def __init__(self, models: Iterable[str]) -> None:
        super().__init__()
        self._of = {model: ObservedPace() for model in models}

    def pace_of(self, model: str) -> Pace | None:
        return self._of[model].pace

    def observe_prefill(self, prompt_tokens: int, took: Duration, *, model: str | None = None) -> None:
        super().observe_prefill(prompt_tokens, took)
        if model is not None:
            self._of[model].observe_prefill(prompt_tokens, took)


class ReportedPace(StepReports):
    """For an engine that measures itself: seen from outside, a request's start is not known. `pace` is what
    it last said; before, what was told of it."""

    def __init__(self, prior: StepCost | None = None) -> None:
        super().__init__(prior)
        self.pace = self._estimate()

    def pace_of(self, model: str) -> Pace | None:
        return self.pace

    def observe_step(self, took: Duration) -> None:
        pass

    def observe_prefill(self, prompt_tokens: int, took: Duration, *, model: str | None = None) -> None:
        pass


def paces(
    step_cost: StepCost | None, embedders: Iterable[Embedder] = ()
) -> dict[Owner, ObservedPace | ReportedPace]:
    """Of those whose work is seen from outside. `step_cost` is the LLM's; what the embedding models measured
    when they started counts as one passage seen: they were alone, and beside an LLM a token takes longer."""
    models = list(embedders)
    embedding = ModelPaces([embedder.model for embedder in models])
    for embedder in models:
        lengths = [min(_PASSAGE_TOKENS, embedder.max_input_tokens)] * _PASSAGES
        if took := embedder.batch_time(lengths):
            embedding.observe_prefill(lengths[0], Duration(took // _PASSAGES), model=embedder.model)
    return {Owner.LLM: ObservedPace(prior=step_cost), Owner.EMBEDDING: embedding}


def _duration(seconds: float) -> Duration:
    return Duration(round(seconds * 1e9))


def _clipped(value: float, present: float) -> float:
    if present <= 0.0:
        return value
    return min(max(value, present / _CLIP_FACTOR), present * _CLIP_FACTOR)
