"""When is a call tried again? Only while nothing of its answer was seen, and never sooner than asked."""

from dataclasses import dataclass
from random import uniform

import httpx

from controlplane.api.wire import HEADER_SHOULD_RETRY
from controlplane.sdk.errors import retry_after_of


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
