"""When is a call tried again? Only while nothing of its answer was seen, and never sooner than asked."""

from dataclasses import dataclass
from random import uniform

import httpx

from controlplane.api.protocol.requests import HEADER_SHOULD_RETRY
from controlplane.sdk.errors import ConnectionLost, TandemError, api_error, retry_after_of


@dataclass(frozen=True, slots=True)
class Retries:
    """`most` more attempts. A server that asks for a longer wait than `longest_wait_s` is not tried again."""

    most: int = 2
    longest_wait_s: float = 30.0
    first_wait_s: float = 0.5

    def wait_s(self, attempt: int, answer: httpx.Response | None) -> float | None:
        """Seconds before attempt `attempt + 1`, jittered; `None` to give up. No answer: no connection."""
        if attempt >= self.most or (answer is not None and not _is_worth_retrying(answer)):
            return None
        asked = None if answer is None else retry_after_of(answer.headers)
        if asked is not None:
            # Never sooner than asked, or all who were turned away would come back together.
            return asked * uniform(1.0, 1.25) if asked <= self.longest_wait_s else None
        return min(self.longest_wait_s, self.first_wait_s * 2.0**attempt) * uniform(0.5, 1.0)


def _is_worth_retrying(answer: httpx.Response) -> bool:
    stated = answer.headers.get(HEADER_SHOULD_RETRY)
    if stated in ("true", "false"):
        return bool(stated == "true")
    return answer.status_code in (408, 409, 429) or answer.status_code >= 500


# A timeout of the answer is the caller's patience at its end: trying again would double the work.
RETRIED = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)

DEFAULT_RETRIES = Retries()


class Attempts:
    """At one call: each failure is answered with the seconds until the next attempt, or raised."""

    def __init__(self, retries: Retries, path: str) -> None:
        self._retries = retries
        self._path = path
        self._failed = 0

    def after_refusal(self, answer: httpx.Response) -> float:
        """`answer` has been read whole."""
        return self._after(api_error(answer.status_code, answer.content, answer.headers), answer)

    def after_loss(self, error: httpx.TransportError, answer: httpx.Response | None) -> float:
        """`answer` if its head had come."""
        failure = ConnectionLost(f"{self._path}: no answer: {error!r}")
        failure.__cause__ = error
        if not isinstance(error, RETRIED):
            raise failure
        return self._after(failure, answer)

    def _after(self, failure: TandemError, answer: httpx.Response | None) -> float:
        wait_s = self._retries.wait_s(self._failed, answer)
        if wait_s is None:
            raise failure
        self._failed += 1
        return wait_s
