"""Bounds the memory of bodies that are being read and of requests that wait or run, in total and by tenant.

`max_body` bounds one body and `admission.max_waiting` the requests, but not what they hold together: a rerank
request of 12 KB makes 310,000 tokens, and each request keeps its body until it ends.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

from controlplane.api.errors import Problem, overload_failure
from controlplane.api.settings import ApiSettings
from controlplane.core.request import Kind


class BodiesTooLarge(Problem):
    """The memory of bodies has no room for a request; it has the overload status."""


class BodyMemory:
    """Counts the bytes that requests hold, by tenant.

    A request of at most `inline_body` bytes is not counted: `admission.max_waiting` bounds the small ones.
    """

    def __init__(self, on_shed: Callable[[Kind], None]) -> None:
        """`on_shed` is called for each request that is rejected."""
        self._held: Counter[str] = Counter()
        self._on_shed = on_shed

    def account(self, tenant: str, kind: Kind, settings: ApiSettings) -> "MemoryAccount":
        """Opens the account of one request of `tenant`; its owner calls `free` at the end."""
        return MemoryAccount(self._held, tenant, settings, partial(self._on_shed, kind))


# A token id takes four bytes; the hashes of a prompt's blocks take two more per token of a generation, and
# the inputs of a pass four more per token of an embedding call.
_BYTES_PER_TOKEN = 8


class MemoryAccount:
    """The bytes that one request holds."""

    def __init__(
        self, held: Counter[str], tenant: str, settings: ApiSettings, on_shed: Callable[[], None]
    ) -> None:
        self._on_shed = on_shed
        self._held = held
        self._tenant = tenant
        self._settings = settings
        self._bytes = self._body_bytes = 0

    def hold_body(self, size: int) -> None:
        """Replaces the bytes that were read by the `size` of the parsed body. Raises BodiesTooLarge."""
        self._body_bytes = size
        self._replace(size)

    def hold_tokens(self, tokens: int) -> None:
        """Adds the token ids of a request that waits or is computed to its body. Raises BodiesTooLarge."""
        self._replace(self._body_bytes + _BYTES_PER_TOKEN * tokens)

    def _replace(self, size: int) -> None:
        self.free()
        self.grow(size)

    @property
    def is_counted(self) -> bool:
        """Whether the request holds more than `inline_body`."""
        return self._bytes > 0

    def free(self) -> None:
        """Gives all bytes back. Idempotent."""
        self._held[self._tenant] -= self._bytes
        self._bytes = 0
        if not self._held[self._tenant]:
            del self._held[self._tenant]

    def grow(self, size: int) -> None:
        """Raises the held bytes to `size`.

        A tenant has at most half of `server.limits.body_memory`; a request that is the only one of its tenant
        is always accepted. Raises BodiesTooLarge.
        """
        limits, others = self._settings.limits, self._held[self._tenant] - self._bytes
        if size <= limits.inline_body:
            return
        most = limits.body_memory
        total = self._held.total() - self._bytes + size
        if others and (total > most or others + size > most // 2):
            self._on_shed()
            status = self._settings.overload_status
            raise BodiesTooLarge(
                status,
                f"the requests in progress take server.limits.body_memory={most:,} bytes, or those of this "
                "tenant half of it; retry after 1 s, and send fewer large requests at once",
                code="overloaded",
                headers=dict(overload_failure(status).headers),
            )
        self._held[self._tenant] += size - self._bytes
        self._bytes = size
