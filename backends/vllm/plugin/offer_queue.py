"""Which waiting requests may vLLM see? Those that the policy offers in this step, in its order.

vLLM's scheduler admits from the head of its waiting queue and stops at the first that does not fit. This
queue holds all that wait, and between `open` and `close` shows only the offer. The policy hears of
everybody who begins or ceases to wait.

Importing this module imports vLLM, which takes seconds.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue

RequestCallback = Callable[[Any], None]


class OfferQueue(RequestQueue):  # type: ignore[misc]
    def __init__(self, on_join: RequestCallback, on_leave: RequestCallback) -> None:
        self._on_join = on_join
        self._on_leave = on_leave
        self._all: dict[str, Any] = {}
        self._offer: deque[Any] = deque()
        self._is_open = False

    def open(self, offer: Sequence[Any]) -> None:
        self._offer = deque(offer)
        self._is_open = True

    def close(self) -> None:
        self._offer.clear()
        self._is_open = False

    def add_request(self, request: Any) -> None:
        self._all[request.request_id] = request
        self._on_join(request)

    def prepend_request(self, request: Any) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Any:
        """Raises IndexError when nothing is offered."""
        return self._offer[0]

    def pop_request(self) -> Any:
        request = self._offer.popleft()
        self._drop(request)
        return request

    def remove_request(self, request: Any) -> None:
        self._drop(request)
        if request in self._offer:
            self._offer.remove(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in list(requests):
            # vLLM asks each of its queues to forget requests that only one of them holds.
            if request.request_id in self._all:
                self.remove_request(request)

    def _drop(self, request: Any) -> None:
        del self._all[request.request_id]
        self._on_leave(request)

    def holds(self, request_id: str) -> bool:
        return request_id in self._all

    def __bool__(self) -> bool:
        return bool(self._offer if self._is_open else self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._all.values()))
