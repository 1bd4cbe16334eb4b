"""Memory leases: the ledger opens them, tracks their growth and closes each exactly once.

The memory of a request is a linear function that ends: `base` bytes now, `per_step` more after each engine
step, all freed after `steps`. For KV cache in blocks the line runs through the outer corners of the
staircase, so it bounds the blocks from above and is exact for blocks of one token.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.request import Owner

Floats = npt.NDArray[np.float64]


class LedgerInvariantError(RuntimeError):
    """An operation on the ledger would violate its invariants."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Predicted bytes over time.

    `worst` is the size if the output is as long as `max_tokens` allows.
    """

    base: int
    per_step: int = 0
    steps: int = 1
    worst: int = 0

    @property
    def peak(self) -> int:
        """Bytes just before release."""
        return self.base + self.per_step * self.steps

    @property
    def area(self) -> float:
        """Memory-time: byte-steps from start to release."""
        return (self.base + self.peak) / 2 * self.steps


def generate_footprint(
    geometry: KvGeometry,
    *,
    prompt_tokens: int,
    max_output_tokens: int,
    expected_tokens: float,
    sequences: int = 1,
) -> Footprint:
    """Footprint of `sequences` samples of one prompt, each with its own copy of the prompt's blocks."""
    corner_tokens = prompt_tokens + geometry.block_tokens - 1
    per_step = geometry.bytes_per_token * sequences
    steps = max(1, min(max_output_tokens, round(expected_tokens)))
    return Footprint(
        base=corner_tokens * per_step,
        per_step=per_step,
        steps=steps,
        worst=geometry.bytes(prompt_tokens + max_output_tokens) * sequences,
    )


@dataclass(frozen=True, slots=True)
class LeaseTable:
    """Open leases of one owner as columns, float64 [n]; row i belongs to `ids[i]`."""

    ids: tuple[str, ...]
    base: Floats
    per_step: Floats
    steps: Floats
    priority: Floats

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def final_bytes(self) -> int:
        """Bytes that all together hold at their predicted ends, if none ends before."""
        return int((self.base + self.per_step * self.steps).sum())

    def with_lease(self, request_id: str, footprint: Footprint, priority: int) -> "LeaseTable":
        """The table with one more lease."""
        row = (footprint.base, footprint.per_step, footprint.steps, priority)
        columns = (self.base, self.per_step, self.steps, self.priority)
        return LeaseTable(
            (*self.ids, request_id), *(np.append(c, v) for c, v in zip(columns, row, strict=True))
        )

    def without(self, request_ids: Iterable[str]) -> "LeaseTable":
        """The table without these leases."""
        gone = set(request_ids)
        return self.only([i for i, name in enumerate(self.ids) if name not in gone])

    def at_least(self, priority: int) -> "LeaseTable":
        """The leases that a request of this priority cannot preempt."""
        return self.only(np.flatnonzero(self.priority >= priority).tolist())

    def only(self, keep: Sequence[int]) -> "LeaseTable":
        """The leases at these positions."""
        columns = (self.base, self.per_step, self.steps, self.priority)
        return LeaseTable(tuple(self.ids[i] for i in keep), *(column[keep] for column in columns))


@dataclass(eq=False, slots=True)
class Lease:
    """Memory held by one request. Opened and closed only by the dispatcher."""

    request_id: str
    owner: Owner
    row: int | None


def _column() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class _OwnerAccount:
    """Rows of one owner, kept dense by moving the last row into a gap.

    The columns are arrays of the standard library, of which an item is read and written in half the time that
    numpy takes, and one lease grows with every token.
    """

    quota: int = 0
    leases: list[Lease] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    base: "array[int]" = field(default_factory=_column)
    per_step: "array[int]" = field(default_factory=_column)
    steps: "array[int]" = field(default_factory=_column)
    priority: "array[int]" = field(default_factory=_column)
    demanded: int = 0
    held: int = 0

    @property
    def columns(self) -> "tuple[array[int], ...]":
        return self.base, self.per_step, self.steps, self.priority

    def table(self) -> LeaseTable:
        return LeaseTable(tuple(self.ids), *(np.array(column, np.float64) for column in self.columns))


class MemoryLedger:
    """Conserves the pool: owners together never hold more than it has.

    Memory held by a lease stays held until the lease shrinks or closes, whatever happens to the quotas; until
    then no other owner can get it. What leases demand beyond the ceiling is a deficit, not held memory.
    """

    def __init__(self, quotas: Mapping[Owner, int]) -> None:
        """The pool has as many bytes as the `quotas` together."""
        self._accounts = {owner: _OwnerAccount() for owner in quotas}
        self.capacity = self._free = sum(quotas.values())
        for owner, quota in quotas.items():
            self.set_quota(owner, quota)

    def quota(self, owner: Owner) -> int:
        """The owner's present quota in bytes."""
        return self._accounts[owner].quota

    def set_quota(self, owner: Owner, quota: int) -> None:
        """Replaces the quota of one owner.

        A quota below present use frees nothing; it stops admission until use has fallen, and only then do the
        others get the difference. Raises ValueError if it is negative or if the quotas exceed the pool.
        """
        others = sum(account.quota for other, account in self._accounts.items() if other is not owner)
        if quota < 0 or others + quota > self.capacity:
            raise ValueError(
                f"quota.{owner}.nominal={quota}: nominal quotas must be 0 or more and sum to at most the "
                f"pool's {self.capacity} bytes; change it or lower another quota first"
            )
        self._accounts[owner].quota = quota
        self._settle()

    def demanded(self, owner: Owner) -> int:
        """Bytes that the owner's leases need, whether or not the pool has them."""
        return self._accounts[owner].demanded

    def ceiling(self, owner: Owner) -> int:
        """Bytes that the owner may hold now: its quota, but no more than it holds and the pool has free."""
        account = self._accounts[owner]
        return min(account.quota, account.held + self._free)

    def held(self, owner: Owner) -> int:
        """Bytes that the owner's leases hold."""
        return self._accounts[owner].held

    def deficit(self, owner: Owner) -> int:
        """Bytes demanded but not held."""
        return self._accounts[owner].demanded - self._accounts[owner].held

    def count(self, owner: Owner) -> int:
        """Number of the owner's leases."""
        return len(self._accounts[owner].leases)

    def table(self, owner: Owner) -> LeaseTable:
        """A copy of the owner's leases as columns."""
        return self._accounts[owner].table()

    def demand_by_request(self, owner: Owner) -> dict[str, int]:
        """Bytes that each of the owner's leases demands, by request id."""
        account = self._accounts[owner]
        return dict(zip(account.ids, account.base, strict=True))

    def remaining_steps(self, owner: Owner) -> dict[str, int]:
        """Predicted remaining steps of each of the owner's leases, by request id."""
        account = self._accounts[owner]
        return dict(zip(account.ids, account.steps, strict=True))

    def lease_state(self, lease: Lease) -> tuple[int, int]:
        """Bytes that the lease demands, and its predicted remaining steps."""
        account, row = self._live(lease)
        return account.base[row], account.steps[row]

    def open(self, request_id: str, owner: Owner, footprint: Footprint, *, priority: int) -> Lease:
        """Opens a lease of the footprint's base. Raises LedgerInvariantError if it is not free now."""
        account = self._accounts[owner]
        if footprint.base and account.demanded + footprint.base > self.ceiling(owner):
            raise LedgerInvariantError(
                f"lease for {request_id}: {footprint.base} bytes needed, "
                f"{self.ceiling(owner) - account.demanded} free under the {owner} quota; admit it later"
            )
        row = (footprint.base, footprint.per_step, footprint.steps, priority)
        for column, value in zip(account.columns, row, strict=True):
            column.append(value)
        lease = Lease(request_id, owner, len(account.leases))
        account.leases.append(lease)
        account.ids.append(request_id)
        account.demanded += footprint.base
        self._settle()
        return lease

    def grow(self, lease: Lease, steps: int) -> int:
        """Adds the growth of `steps` engine steps; past its predicted end one step is left.

        Returns the predicted remaining steps.
        """
        account, row = self._live(lease)
        left = account.steps[row] - steps
        if left < 1:
            left = 1
        account.steps[row] = left
        if added := account.per_step[row] * steps:
            account.base[row] += added
            had_deficit = account.held < account.demanded
            account.demanded += added
            # Growth frees nothing, so no deficit that there was can be covered now.
            if not had_deficit:
                self._cover(account)
        return left

    def set_reported(self, lease: Lease, *, held: int, per_step: int) -> None:
        """Sets the bytes that the engine reports for the lease, and its growth per step."""
        account, row = self._live(lease)
        account.demanded += held - account.base[row]
        account.base[row], account.per_step[row] = held, per_step
        self._settle()

    def reforecast(self, lease: Lease, *, steps: int) -> None:
        """Replaces the predicted remaining steps."""
        account, row = self._live(lease)
        account.steps[row] = max(1, steps)

    def close(self, lease: Lease) -> None:
        """Frees the memory of the lease. Raises LedgerInvariantError on the second call."""
        account, row = self._live(lease)
        account.demanded -= account.base[row]
        last, last_id, values = account.leases.pop(), account.ids.pop(), [c.pop() for c in account.columns]
        if last is not lease:
            for column, value in zip(account.columns, values, strict=True):
                column[row] = value
            account.leases[row], account.ids[row] = last, last_id
            last.row = row
        lease.row = None
        self._settle()

    def check_integrity(self) -> None:
        """Raises LedgerInvariantError if rows, leases and totals disagree."""
        for owner, account in self._accounts.items():
            if account.demanded != sum(account.base):
                raise LedgerInvariantError(f"{owner}: total {account.demanded} is not the sum of its leases")
            if not 0 <= account.held <= account.demanded:
                raise LedgerInvariantError(
                    f"{owner}: {account.held} bytes held, its leases demand {account.demanded}"
                )
            if [lease.row for lease in account.leases] != list(range(len(account.leases))):
                raise LedgerInvariantError(f"{owner}: a lease points at the row of another lease")
        if self._free != self.capacity - sum(account.held for account in self._accounts.values()):
            raise LedgerInvariantError(f"{self._free} bytes free is not what the owners leave")
        if self._free < 0:
            raise LedgerInvariantError("the owners hold more memory than the pool has")

    def _settle(self) -> None:
        """Releases memory that is no longer demanded, then covers deficits from free memory."""
        for account in self._accounts.values():
            if (released := account.held - account.demanded) > 0:
                account.held -= released
                self._free += released
        for account in self._accounts.values():
            if account.held < account.demanded:
                self._cover(account)

    def _cover(self, account: _OwnerAccount) -> None:
        """Covers the deficit of one owner from free memory, as far as its ceiling allows."""
        missing = account.demanded - account.held
        if missing > self._free or account.demanded > account.quota:
            missing = max(0, min(missing, account.quota - account.held, self._free))
        account.held += missing
        self._free -= missing

    def _live(self, lease: Lease) -> tuple[_OwnerAccount, int]:
        if lease.row is None:
            raise LedgerInvariantError(
                f"lease for {lease.request_id} is closed; a lease is closed exactly once"
            )
        return self._accounts[lease.owner], lease.row
