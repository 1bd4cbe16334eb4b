"""Retry policy: a call is retried only before any part of its response arrived, after Retry-After."""

from dataclasses import dataclass
from random import uniform

import httpx

from controlplane.api.protocol.requests import HEADER_SHOULD_RETRY
from controlplane.sdk.errors import ConnectionLost, TandemError, api_error, retry_after_of


@dataclass(frozen=True, slots=True)
class Retries:
    """Limits of the retries.

    Up to `most` further attempts, with exponential backoff from `first_wait_s`. If the server states a delay
    longer than `longest_wait_s`, the call fails.
    """

    most: int = 2
    longest_wait_s: float = 30.0
    first_wait_s: float = 0.5

    def wait_s(self, attempt: int, response: httpx.Response | None) -> float | None:
        """Jittered seconds before the next attempt, or None to give up.

        Args:
            attempt: number of failed attempts before this one.
            response: the error response; None if there was no connection.
        """
        if attempt >= self.most or (response is not None and not _is_worth_retrying(response)):
            return None
        asked = None if response is None else retry_after_of(response.headers)
        if asked is not None:
            # Never earlier than asked: the server spaces the retries of rejected requests.
            return asked * uniform(1.0, 1.25) if asked <= self.longest_wait_s else None
        return min(self.longest_wait_s, self.first_wait_s * 2.0**attempt) * uniform(0.5, 1.0)


def _is_worth_retrying(response: httpx.Response) -> bool:
    stated = response.headers.get(HEADER_SHOULD_RETRY)
    if stated in ("true", "false"):
        return bool(stated == "true")
    return response.status_code in (408, 409, 429) or response.status_code >= 500


# A read timeout is not retried: the caller has waited its limit, and a retry would double the work.
RETRIED = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)

DEFAULT_RETRIES = Retries()


class Attempts:
    """Counts the attempts of one call; each failure yields the wait before the next attempt, or is raised."""

    def __init__(self, retries: Retries, path: str) -> None:
        self._retries = retries
        self._path = path
        self._failed = 0

    def after_refusal(self, response: httpx.Response) -> float:
        """Seconds to wait after an error response, whose body was read. Raises ApiError to give up."""
        return self._after(api_error(response.status_code, response.content, response.headers), response)

    def after_loss(self, error: httpx.TransportError, response: httpx.Response | None) -> float:
        """Seconds to wait after a transport error. Raises ConnectionLost to give up.

        `response` is the response if its headers had arrived.
        """
        failure = ConnectionLost(f"{self._path}: no response: {error!r}")
        failure.__cause__ = error
        if not isinstance(error, RETRIED):
            raise failure
        return self._after(failure, response)

    def _after(self, failure: TandemError, response: httpx.Response | None) -> float:
        wait_s = self._retries.wait_s(self._failed, response)
        if wait_s is None:
            raise failure
        self._failed += 1
        return wait_s
