"""What if nothing can be learned of a request? Then nothing is, and its answer goes on.

Rule: whatever a forecast or a lesson raises ends here. It is counted, logged once for each place that it
comes from, and the service says that it is impaired until the like succeeds. An answer whose length cannot be
forecast is thought to be as long as it may.
"""

import logging
from contextlib import AbstractContextManager
from enum import StrEnum
from traceback import walk_tb
from types import CodeType, TracebackType

from controlplane.core.forecast import LengthForecast
from controlplane.core.ports import LengthPredictor
from controlplane.core.request import Request
from controlplane.metrics import Metrics
from predictors.output_length.history import MaxTokens

log = logging.getLogger(__name__)


class Subject(StrEnum):
    LENGTH_FORECAST = "length_forecast"
    REMAINING_LENGTH = "remaining_length"
    ANSWER_LENGTH = "answer_length"
    LOST_ANSWER = "lost_answer"
    PACE = "pace"
    PROMPT_VECTORS = "prompt_vectors"


class Guard(AbstractContextManager["Guard"]):
    """`with lesson:` around what may fail."""

    def __init__(self, subject: Subject, metrics: Metrics) -> None:
        self._subject = subject
        self._metrics = metrics
        self._logged: set[tuple[CodeType, int]] = set()
        self.is_failing = False
        metrics.may_not_learn(subject)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self.is_failing = False
            return False
        if not isinstance(error, Exception):
            return False
        self.is_failing = True
        self._metrics.not_learned(self._subject)
        *_, (frame, line) = walk_tb(trace)
        if (frame.f_code, line) not in self._logged:
            self._logged.add((frame.f_code, line))
            log.error("%s: %s; requests go on without it", self._subject, error, exc_info=error)
        return True


class FailOpen:
    def __init__(self, metrics: Metrics) -> None:
        self._guards = {subject: Guard(subject, metrics) for subject in Subject}

    def __getitem__(self, subject: Subject) -> Guard:
        return self._guards[subject]

    @property
    def is_failing(self) -> bool:
        return any(lesson.is_failing for lesson in self._guards.values())


class GuardedLengthPredictor:
    """What a `LengthPredictor` says and learns, whatever becomes of it."""

    def __init__(self, given: LengthPredictor, lessons: FailOpen) -> None:
        self.fail_open = lessons
        self._predictor = given

    def forecast(self, request: Request, *, default: LengthForecast | None = None) -> LengthForecast:
        with self.fail_open[Subject.LENGTH_FORECAST]:
            return self._predictor.forecast(request)
        return default or MaxTokens().forecast(request)

    def observe(self, request: Request, output_tokens: int) -> None:
        with self.fail_open[Subject.ANSWER_LENGTH]:
            self._predictor.observe(request, output_tokens)

    def withdraw(self, request: Request) -> None:
        with self.fail_open[Subject.LOST_ANSWER]:
            self._predictor.withdraw(request)
