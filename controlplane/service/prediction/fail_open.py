"""Wraps the predictors so that an exception in one never fails a request.

The exception is counted and logged once for each line that raises it; the service reports itself as impaired
until the same operation succeeds. Where the length forecast fails, the request's max_tokens is used.
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
from predictors.output_length.history_predictor import MaxTokens

log = logging.getLogger(__name__)


class Subject(StrEnum):
    """The operations that are guarded, as the metrics name them."""

    LENGTH_FORECAST = "length_forecast"
    REMAINING_LENGTH = "remaining_length"
    ANSWER_LENGTH = "answer_length"
    LOST_ANSWER = "lost_answer"
    PACE = "pace"
    PROMPT_VECTORS = "prompt_vectors"


class Guard(AbstractContextManager["Guard"]):
    """Context manager that suppresses, counts and logs the exceptions of one operation."""

    def __init__(self, subject: Subject, metrics: Metrics) -> None:
        self._subject = subject
        self._metrics = metrics
        self._logged: set[tuple[CodeType, int]] = set()
        self.is_failing = False
        metrics.declare_predictor(subject)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self.is_failing = False
            return False
        if not isinstance(error, Exception):
            return False
        self.is_failing = True
        self._metrics.count_predictor_failure(self._subject)
        *_, (frame, line) = walk_tb(trace)
        if (frame.f_code, line) not in self._logged:
            self._logged.add((frame.f_code, line))
            log.error("%s: %s; requests continue without it", self._subject, error, exc_info=error)
        return True


class FailOpen:
    """One guard for each subject: `with fail_open[subject]: ...`."""

    def __init__(self, metrics: Metrics) -> None:
        self._guards = {subject: Guard(subject, metrics) for subject in Subject}

    def __getitem__(self, subject: Subject) -> Guard:
        return self._guards[subject]

    @property
    def is_failing(self) -> bool:
        """Whether the last run of any guarded operation failed."""
        return any(guard.is_failing for guard in self._guards.values())


class GuardedLengthPredictor:
    """A LengthPredictor whose exceptions are suppressed."""

    def __init__(self, predictor: LengthPredictor, fail_open: FailOpen) -> None:
        self.fail_open = fail_open
        self._predictor = predictor

    def forecast(self, request: Request, *, default: LengthForecast | None = None) -> LengthForecast:
        """The predictor's forecast; if that fails `default`, or max_tokens without one."""
        with self.fail_open[Subject.LENGTH_FORECAST]:
            return self._predictor.forecast(request)
        return default or MaxTokens().forecast(request)

    def observe(self, request: Request, output_tokens: int) -> None:
        """Trains the predictor with a finished request."""
        with self.fail_open[Subject.ANSWER_LENGTH]:
            self._predictor.observe(request, output_tokens)

    def withdraw(self, request: Request) -> None:
        """Drops the forecast of a request that did not finish."""
        with self.fail_open[Subject.LOST_ANSWER]:
            self._predictor.withdraw(request)
