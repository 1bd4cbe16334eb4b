"""A vLLM waiting queue that shows the scheduler only the requests offered by the engine policy.

vLLM's scheduler admits from the head of its waiting queue and stops at the first request that does not fit.
This queue holds all waiting requests, but between `open` and `close` it shows only those offered for the
step, in the policy's order. It reports every request that enters or leaves it to the policy.

Importing this module imports vLLM, which takes seconds.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue

RequestCallback = Callable[[Any], None]


class OfferQueue(RequestQueue):  # type: ignore[misc]
    """vLLM's `RequestQueue` over all waiting requests; `on_enqueue` and `on_dequeue` report changes."""

    def __init__(self, on_enqueue: RequestCallback, on_dequeue: RequestCallback) -> None:
        self._on_enqueue = on_enqueue
        self._on_dequeue = on_dequeue
        self._all: dict[str, Any] = {}
        self._offer: deque[Any] = deque()
        self._is_open = False

    def open(self, offer: Sequence[Any]) -> None:
        """Shows only the requests of `offer`, in this order, until `close`."""
        self._offer = deque(offer)
        self._is_open = True

    def close(self) -> Sequence[Any]:
        """Ends the step; requests not admitted keep waiting. Returns those that were offered."""
        rest, self._offer = self._offer, deque()
        self._is_open = False
        return rest

    def add_request(self, request: Any) -> None:
        """Adds a new or preempted request; the policy decides its position."""
        self._all[request.request_id] = request
        self._on_enqueue(request)

    def prepend_request(self, request: Any) -> None:
        """Adds a request; the policy decides its position."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Adds several requests; the policy decides their positions."""
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Any:
        """The next offered request. Raises IndexError if none is left."""
        return self._offer[0]

    def pop_request(self) -> Any:
        """Removes and returns the next offered request. Raises IndexError if none is left."""
        request = self._offer.popleft()
        self._drop(request)
        return request

    def remove_request(self, request: Any) -> None:
        """Removes a waiting request."""
        self._drop(request)
        if request in self._offer:
            self._offer.remove(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Removes those of the requests that this queue holds."""
        for request in list(requests):
            # vLLM calls this on each of its queues for requests that only one of them holds.
            if request.request_id in self._all:
                self.remove_request(request)

    def _drop(self, request: Any) -> None:
        del self._all[request.request_id]
        self._on_dequeue(request)

    def holds(self, request_id: str) -> bool:
        """Whether the request waits here."""
        return request_id in self._all

    def __bool__(self) -> bool:
        return bool(self._offer if self._is_open else self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._all.values()))


class SkippedQueue(RequestQueue):  # type: ignore[misc]
    """vLLM's queue of skipped requests, in releases that have one (0.26 to 0.30); all wait in `waiting`.

    There vLLM puts a request whose grammar is not compiled, and one that a step skipped, into a queue of its
    own, from which it would start them without the policy's offer. It tries a blocked request again when that
    is offered.
    """

    def __init__(self, waiting: OfferQueue) -> None:
        self._waiting = waiting

    def add_request(self, request: Any) -> None:
        """Adds the request to the waiting ones."""
        self._waiting.add_request(request)

    def prepend_request(self, request: Any) -> None:
        """Adds the request to the waiting ones; the policy decides its position."""
        self._waiting.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Adds the requests to the waiting ones; the policy decides their positions."""
        self._waiting.prepend_requests(requests)

    def peek_request(self) -> Any:
        """Raises IndexError."""
        raise IndexError("this queue holds no request")

    def pop_request(self) -> Any:
        """Raises IndexError."""
        return self.peek_request()

    def remove_request(self, request: Any) -> None:
        """Raises KeyError."""
        raise KeyError(request.request_id)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Removes none; `waiting` is asked, too."""

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())
