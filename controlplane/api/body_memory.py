"""Bounds the bytes of all bodies that are being read and parsed, and each tenant's part of them.

`max_body` bounds one of them, and nothing bounds the connections of a tenant.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from controlplane.api.errors import Problem, overload_failure
from controlplane.api.settings import ApiSettings
from controlplane.core.request import Kind


class BodiesTooLarge(Problem):
    """A body that is not read because others take the memory for it; it has the overload status."""


class BodyMemory:
    """The bytes that are held, by tenant; bodies of up to `inline_body` bytes are not counted."""

    def __init__(self, on_shed: Callable[[Kind], None]) -> None:
        """`on_shed` is called for each request that is rejected."""
        self._held: Counter[str] = Counter()
        self._on_shed = on_shed

    @contextmanager
    def part(self, tenant: str, kind: Kind, settings: ApiSettings) -> Iterator["BodyPart"]:
        """What one request of `tenant` holds until the block ends."""
        part = BodyPart(self._held, tenant, settings)
        try:
            yield part
        except BodiesTooLarge:
            self._on_shed(kind)
            raise
        finally:
            part.free()


class BodyPart:
    """The bytes that one request holds."""

    def __init__(self, held: Counter[str], tenant: str, settings: ApiSettings) -> None:
        self._held = held
        self._tenant = tenant
        self._settings = settings
        self._bytes = 0

    def free(self) -> None:
        """Holds nothing any more."""
        self._held[self._tenant] -= self._bytes
        if not self._held[self._tenant]:
            del self._held[self._tenant]

    def grow(self, size: int) -> None:
        """Holds `size` bytes from now on.

        A tenant has at most half of `server.limits.body_memory`; a body that is the only one of its tenant is
        always accepted. Raises BodiesTooLarge.
        """
        limits, others = self._settings.limits, self._held[self._tenant] - self._bytes
        if size <= limits.inline_body:
            return
        most = limits.body_memory
        total = self._held.total() - self._bytes + size
        if others and (total > most or others + size > most // 2):
            status = self._settings.overload_status
            raise BodiesTooLarge(
                status,
                f"bodies that are being read take server.limits.body_memory={most:,} bytes, or those of this "
                "tenant half of it; retry after 1 s, and send fewer large bodies at once",
                code="overloaded",
                headers=dict(overload_failure(status).headers),
            )
        self._held[self._tenant] += size - self._bytes
        self._bytes = size
