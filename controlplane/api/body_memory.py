"""Bounds the memory of bodies that are being read and of requests that wait or run, also by tenant.

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
    """A request that is refused because others take the memory for it; it has the overload status."""


class BodyMemory:
    """The bytes that are held, by tenant; those of requests with up to `inline_body` are not counted.

    Small requests are then bounded by `admission.max_waiting`.
    """

    def __init__(self, on_shed: Callable[[Kind], None]) -> None:
        """`on_shed` is called for each request that is rejected."""
        self._held: Counter[str] = Counter()
        self._on_shed = on_shed

    def part(self, tenant: str, kind: Kind, settings: ApiSettings) -> "BodyPart":
        """What one request of `tenant` holds until it calls `free`."""
        return BodyPart(self._held, tenant, settings, partial(self._on_shed, kind))


# What was tokenized here has four bytes for each token, the prompt of a generation two more for the hashes of
# blocks, and inputs that are computed four more.
_BYTES_PER_TOKEN = 8


class BodyPart:
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
        """Holds so many bytes of a parsed body, instead of those that were read. Raises BodiesTooLarge."""
        self._body_bytes = size
        self._hold_besides(0)

    def hold_tokens(self, tokens: int) -> None:
        """Holds the inputs of a request, which waits or is computed. Raises BodiesTooLarge."""
        self._hold_besides(_BYTES_PER_TOKEN * tokens)

    def _hold_besides(self, size: int) -> None:
        self.free()
        self.grow(self._body_bytes + size)

    @property
    def is_counted(self) -> bool:
        """Whether the request holds more than `inline_body`."""
        return self._bytes > 0

    def free(self) -> None:
        """Holds nothing any more."""
        self._held[self._tenant] -= self._bytes
        self._bytes = 0
        if not self._held[self._tenant]:
            del self._held[self._tenant]

    def grow(self, size: int) -> None:
        """Holds `size` bytes from now on.

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
