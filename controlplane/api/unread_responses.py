"""Bounds the memory of finished responses that clients do not read.

A response waits in the server until its client reads it, and no limit of the gate counts a request that has
ended: clients that open connections and read nothing would keep a response of megabytes on each of them for
`server.stalled_client_ms`.
"""

from asyncio import WriteTransport

from controlplane.api.memory_release import MemoryRelease


class UnreadResponses:
    """The unsent bytes of finished responses, by connection; the one that has waited longest is the first."""

    def __init__(self) -> None:
        self._sizes: dict[WriteTransport, int] = {}
        self._total = 0
        self._release = MemoryRelease()

    def hold(self, transport: WriteTransport, size: int, most: int) -> None:
        """Holds so many bytes for a connection from now on, 0 for none.

        If all together are more than `most`, the connections that have waited longest are closed. The newest
        one is kept in any case, since its client had no time to read yet. Call it from the event loop.
        """
        self._total += size - self._sizes.pop(transport, 0)
        if size:
            self._sizes[transport] = size
        if self._total <= most:
            return
        # Clients have read since.
        self._sizes = {each: left for each in self._sizes if (left := each.get_write_buffer_size())}
        self._total = sum(self._sizes.values())
        for oldest in list(self._sizes)[:-1]:
            if self._total <= most:
                return
            self._total -= self._sizes.pop(oldest)
            oldest.abort()
            self._release.schedule()
