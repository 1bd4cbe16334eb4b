"""Retry policy: a call is retried only before any part of its response arrived, after Retry-After."""

from dataclasses import dataclass
from random import uniform

import httpx

from controlplane.sdk.deadline import CallDeadline, ended_by
from controlplane.sdk.errors import ApiError, ConnectionLost, TandemError, api_error


@dataclass(frozen=True, slots=True)
class Retries:
    """Limits of the retries.

    Up to `most` further attempts, with exponential backoff from `first_wait_s`. If the server states a delay
    longer than `longest_wait_s`, the call fails.
    """

    most: int = 2
    longest_wait_s: float = 30.0
    first_wait_s: float = 0.5

    def wait_s(self, attempt: int, failure: TandemError) -> float | None:
        """Jittered seconds before the next attempt, or None to give up.

        Args:
            attempt: number of failed attempts before this one.
            failure: the error of this attempt.
        """
        if attempt >= self.most or (isinstance(failure, ApiError) and not failure.is_retryable):
            return None
        asked = failure.retry_after if isinstance(failure, ApiError) else None
        if asked is None:
            return self.backoff_s(attempt)
        return spaced(asked) if asked <= self.longest_wait_s else None

    def backoff_s(self, attempt: int) -> float:
        """Jittered seconds before the next attempt if the server states no time."""
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(attempt, 30)) * uniform(0.5, 1.0)


def spaced(retry_after: float) -> float:
    """Jittered seconds, never fewer than the server asked for: it spaces the retries of rejected requests."""
    return retry_after * uniform(1.0, 1.25)


# A read timeout is not retried: the caller has waited its limit, and a retry would double the work.
RETRIED = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)

DEFAULT_RETRIES = Retries()
NO_RETRIES = Retries(most=0)


class Attempts:
    """Counts the attempts of one call; each failure yields the wait before the next attempt, or is raised."""

    def __init__(self, retries: Retries, path: str, deadline: CallDeadline | None) -> None:
        self._retries = retries
        self._path = path
        self._deadline = deadline
        self._failed = 0

    def after_refusal(self, response: httpx.Response) -> float:
        """Seconds to wait after an error response, whose body was read. Raises ApiError to give up."""
        return self._after(api_error(response.status_code, response.content, response.headers))

    def after_loss(self, error: httpx.TransportError) -> float:
        """Seconds to wait after a transport error. Raises ConnectionLost or DeadlineExceeded to give up."""
        if (ended := ended_by(self._deadline, error, self._path)) is not None:
            raise ended from error
        failure = ConnectionLost(f"{self._path}: no response: {error!r}")
        failure.__cause__ = error
        if not isinstance(error, RETRIED):
            raise failure
        return self._after(failure)

    def _after(self, failure: TandemError) -> float:
        wait_s = self._retries.wait_s(self._failed, failure)
        if wait_s is None or (self._deadline is not None and wait_s >= self._deadline.remaining_s()):
            raise failure
        self._failed += 1
        return wait_s
