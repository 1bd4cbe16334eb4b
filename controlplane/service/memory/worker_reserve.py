"""Memory that workers of embedding models reserve, beyond what the plan of the start gave them.

A worker that is loading needs its weights and the workspace of its first passes while the workers beside it
compute. What it needs is taken out of the quotas, so that no request is admitted on it.
"""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from controlplane.config import ConfigError
from controlplane.core.errors import BackendDown
from controlplane.core.ports import Embedder
from controlplane.core.request import Owner
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.gate.dispatcher import Dispatcher
from controlplane.service.memory.pool import longest_input_bytes, split_budget
from controlplane.service.memory.quota_controller import QuotaController
from controlplane.service.ticket import Ticket

RESERVE_SECONDS = 60.0
"""How long a reservation waits for the requests that hold the memory."""


class WorkerReserve(Protocol):
    """Takes memory out of the quotas: for workers, and what the device is found not to have."""

    def withhold(self, withheld_bytes: int) -> None:
        """Withholds these bytes, as far as the largest request of each kind still fits."""

    @property
    def reservable(self) -> int:
        """Most bytes that may be reserved at once: the largest request of each kind must still fit."""
        ...

    async def reserve(self, total: int) -> None:
        """Reserves `total` bytes, those reserved before included; returns once no request uses them.

        Raises BackendDown if they are not free within `RESERVE_SECONDS`; call `release` then.
        """

    def release(self, total: int) -> None:
        """Keeps only `total` bytes reserved, and divides the rest among the workers that run now."""

    def require_room(self, after: Collection[Embedder], total: int) -> None:
        """Raises ConfigError unless the workers `after` a change fit beside `total` reserved bytes."""


class WorkspaceQuota:
    """The embeddings' quota where no quota moves: what batches may take of it, and what workers reserve.

    Without reservation and withheld bytes each worker has the workspace that it asks for.
    """

    def __init__(self, encoders: EncoderRegistry, dispatcher: Dispatcher) -> None:
        self._quota = dispatcher.ledger.quota(Owner.EMBEDDING)
        self._encoders = encoders
        self._dispatcher = dispatcher
        self._reserved = self._withheld = 0
        self._ended = asyncio.Event()
        dispatcher.accounting.on_end.append(self._request_ended)

    def withhold(self, withheld_bytes: int) -> None:
        """Cuts the batches, since the device has less memory; the engine's KV cache cannot shrink."""
        self._withheld = withheld_bytes
        self._divide()

    @property
    def reservable(self) -> int:
        """The quota less the longest input of each worker."""
        return self._quota - sum(map(longest_input_bytes, self._encoders.running))

    async def reserve(self, total: int) -> None:
        """Lowers the quota; waits until the leases fit, and for the requests of workers with a cut budget.

        A worker that may still take its whole workspace needs no wait: the quota has room for all of them.
        """
        is_more = total > self._reserved
        self.release(total)
        if not is_more:
            return
        former = {
            ticket.request.id
            for ticket, worker in self._computing()
            if worker.budget_bytes < worker.workspace_bytes
        }
        ledger, left = self._dispatcher.ledger, self._quota - total
        with _bounded(total):
            async with asyncio.timeout(RESERVE_SECONDS):
                while ledger.demanded(Owner.EMBEDDING) > left or any(
                    ticket.request.id in former for ticket, _ in self._computing()
                ):
                    self._ended.clear()
                    await self._ended.wait()

    def release(self, total: int) -> None:
        """Keeps only `total` bytes reserved; each worker gets its part of the rest."""
        self._reserved = total
        left = self._quota - total
        self._dispatcher.ledger.set_quota(Owner.EMBEDDING, left)
        self._dispatcher.cap_footprints(Owner.EMBEDDING, left)
        self._divide()

    def require_room(self, after: Collection[Embedder], total: int) -> None:
        """The largest batches must fit, as at the start."""
        needed = sum(worker.workspace_bytes for worker in after)
        if needed > self._quota - total:
            raise ConfigError(
                f"{_named(after)}: the largest batches take {needed:,} bytes and quota.embedding leaves "
                f"{self._quota - total:,}; lower batch_tokens, or restart with a larger "
                "quota.embedding.nominal or pool.memory"
            )

    def _divide(self) -> None:
        """Gives each worker its part; all of its workspace if nothing is short."""
        running = self._encoders.running
        whole = min(sum(worker.workspace_bytes for worker in running), self._quota - self._reserved)
        split_budget(max(whole - self._withheld, sum(map(longest_input_bytes, running))), running)

    def _computing(self) -> Iterator[tuple[Ticket, Embedder]]:
        for ticket in self._dispatcher.tickets():
            if ticket.lease is not None and ticket.embedder is not None:
                yield ticket, ticket.embedder

    def _request_ended(self, ticket: Ticket) -> None:
        self._ended.set()


class PoolReserve:
    """What workers reserve of a pool whose quotas move: of the embeddings' quota first, then of the LLM's."""

    def __init__(self, quotas: QuotaController) -> None:
        self._quotas = quotas

    def withhold(self, withheld_bytes: int) -> None:
        """Withholds these bytes from the next tick on."""
        self._quotas.withhold(withheld_bytes)

    @property
    def reservable(self) -> int:
        """The pool less the largest request of each kind."""
        return self._quotas.pool.memory.pool_bytes - self._quotas.least_bytes

    async def reserve(self, total: int) -> None:
        """Takes `total` bytes from the quotas, and waits until the engine and the batches have left them."""
        is_more, self._quotas.reserved = total > self._quotas.reserved, total
        if not is_more:
            return
        with _bounded(total):
            async with asyncio.timeout(RESERVE_SECONDS):
                await self._quotas.until_unused(total)

    def release(self, total: int) -> None:
        """Keeps only `total` bytes reserved; the quotas grow from the next tick on."""
        self._quotas.reserved = total
        self._quotas.workers_changed()

    def require_room(self, after: Collection[Embedder], total: int) -> None:
        """The longest inputs must fit; the shares follow demand."""
        needed = sum(map(longest_input_bytes, after))
        left = self._quotas.pool.memory.pool_bytes - self._quotas.least_llm_bytes - total
        if needed > left:
            raise ConfigError(
                f"{_named(after)}: the longest inputs take {needed:,} bytes and the pool leaves {left:,}; "
                "lower max_input_tokens, or restart with a larger pool.memory"
            )


@contextmanager
def _bounded(total: int) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise BackendDown(
            f"{total:,} bytes for the new workers were not free within {RESERVE_SECONDS:.0f} s, because "
            "running requests hold them; repeat the change when fewer run"
        ) from None


def _named(workers: Collection[Embedder]) -> str:
    return f"models.embeddings and models.rerankers ({', '.join(worker.model for worker in workers)})"
