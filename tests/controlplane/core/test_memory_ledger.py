"""Ledger under random calls: memory is conserved, ceilings hold, each lease closes once."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.memory_ledger import (
    Footprint,
    Lease,
    LedgerInvariantError,
    MemoryLedger,
    generate_footprint,
)
from controlplane.core.request import Owner

OWNERS = st.sampled_from(list(Owner))
POOL = 1_000

footprints = st.builds(
    Footprint,
    base=st.integers(0, 400),
    per_step=st.integers(0, 30),
    steps=st.integers(1, 50),
)


class Ledger(RuleBasedStateMachine):
    """The ledger against a plain dictionary of the bytes of every open lease."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = MemoryLedger({Owner.LLM: 700, Owner.EMBEDDING: 300})
        self.expected: dict[Lease, tuple[int, int, int]] = {}
        self.opened = 0

    @rule(target=leases, owner=OWNERS, footprint=footprints, priority=st.integers(0, 3))
    def open(self, owner: Owner, footprint: Footprint, priority: int) -> Any:
        self.opened += 1
        before = self.ledger.demanded(owner)
        fits = footprint.base == 0 or before + footprint.base <= self.ledger.ceiling(owner)
        try:
            lease = self.ledger.open(f"r{self.opened}", owner, footprint, priority=priority)
        except LedgerInvariantError as broken:
            assert not fits, broken
            assert self.ledger.demanded(owner) == before
            return multiple()  # no lease was opened
        assert fits
        self.expected[lease] = (footprint.base, footprint.per_step, footprint.steps)
        return lease

    @rule(lease=leases, steps=st.integers(0, 20))
    def grow(self, lease: Lease, steps: int) -> None:
        base, per_step, left = self.expected[lease]
        self.ledger.grow(lease, steps)
        self.expected[lease] = (base + per_step * steps, per_step, max(1, left - steps))

    @rule(lease=leases, held=st.integers(0, 400), per_step=st.integers(0, 30))
    def set_reported(self, lease: Lease, held: int, per_step: int) -> None:
        self.ledger.set_reported(lease, held=held, per_step=per_step)
        self.expected[lease] = (held, per_step, self.expected[lease][2])

    @rule(lease=leases, steps=st.integers(0, 40))
    def reforecast(self, lease: Lease, steps: int) -> None:
        self.ledger.reforecast(lease, steps=steps)
        base, per_step, _ = self.expected[lease]
        self.expected[lease] = (base, per_step, max(1, steps))

    @rule(lease=consumes(leases))
    def close(self, lease: Lease) -> None:
        self.ledger.close(lease)
        del self.expected[lease]
        for again in (self.ledger.close, lambda gone: self.ledger.grow(gone, 1), self.ledger.lease_state):
            with pytest.raises(LedgerInvariantError, match="closed exactly once"):
                again(lease)

    @rule(owner=OWNERS, nominal=st.integers(0, POOL))
    def set_quota(self, owner: Owner, nominal: int) -> None:
        other = next(o for o in Owner if o is not owner)
        wanted = self.ledger.demanded(owner)
        held = {one: self.ledger.held(one) for one in Owner}
        if nominal + self.ledger.quota(other) > POOL:
            with pytest.raises(ValueError, match="sum to at most the pool's 1000 bytes"):
                self.ledger.set_quota(owner, nominal)
        else:
            self.ledger.set_quota(owner, nominal)
        assert self.ledger.demanded(owner) == wanted
        assert all(self.ledger.held(one) >= held[one] for one in Owner), "a lower quota frees no memory"

    @precondition(lambda self: self.expected)
    @rule(owner=OWNERS)
    def tables_agree_with_leases(self, owner: Owner) -> None:
        mine = {lease.request_id: at for lease, at in self.expected.items() if lease.owner is owner}
        table = self.ledger.table(owner)
        rows = zip(table.ids, table.base, table.per_step, table.steps, strict=True)
        assert {name: (int(b), int(p), int(s)) for name, b, p, s in rows} == mine
        for lease, (base, _, left) in self.expected.items():
            assert self.ledger.lease_state(lease) == (base, left)

    @invariant()
    def memory_is_conserved(self) -> None:
        ledger = self.ledger
        ledger.check_integrity()
        assert sum(ledger.held(owner) for owner in Owner) <= ledger.capacity == POOL
        for owner in Owner:
            quota, held = ledger.quota(owner), ledger.held(owner)
            other = next(o for o in Owner if o is not owner)
            assert 0 <= held <= ledger.demanded(owner) == held + ledger.deficit(owner)
            assert ledger.ceiling(owner) <= min(quota, POOL - ledger.held(other))
            assert ledger.deficit(owner) == 0 or held >= ledger.ceiling(owner), "free memory covers deficits"
            assert ledger.demanded(owner) == sum(
                base for lease, (base, _, _) in self.expected.items() if lease.owner is owner
            )

    @invariant()
    def every_coverable_deficit_is_covered(self) -> None:
        """Setting a quota to its value covers all deficits anew, and finds none that can be covered."""
        ledger = self.ledger
        held = {owner: ledger.held(owner) for owner in Owner}
        for owner in Owner:
            ledger.set_quota(owner, ledger.quota(owner))
        assert {owner: ledger.held(owner) for owner in Owner} == held


Ledger.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = Ledger.TestCase


@given(
    prompt=st.integers(1, 300),
    output=st.integers(1, 200),
    block=st.sampled_from([1, 16, 64]),
    n=st.integers(1, 3),
)
def test_a_footprint_bounds_the_blocks_of_a_generation(prompt: int, output: int, block: int, n: int) -> None:
    geometry = KvGeometry(4, 2, block)
    footprint = generate_footprint(
        geometry,
        prompt_tokens=prompt,
        max_output_tokens=output,
        expected_tokens=output,
        sequences=n,
    )
    for done in range(output + 1):
        staircase = geometry.bytes(prompt + done) * n
        line = footprint.base + footprint.per_step * done
        assert staircase <= line < staircase + n * geometry.bytes_per_block
        assert block > 1 or line == staircase
    assert footprint.worst == geometry.bytes(prompt + output) * n


def test_expected_steps_stay_between_one_and_the_cap() -> None:
    geometry = KvGeometry(1, 1, 1)
    for expected, steps in ((0.2, 1), (5.0, 5), (99.0, 10)):
        made = generate_footprint(geometry, prompt_tokens=3, max_output_tokens=10, expected_tokens=expected)
        assert made.steps == steps


def test_area_is_the_memory_time_of_the_footprint() -> None:
    assert Footprint(base=10, per_step=2, steps=5).area == (10 + 20) / 2 * 5


def test_hypothetical_tables_leave_the_original_unchanged() -> None:
    ledger = MemoryLedger({Owner.LLM: 100, Owner.EMBEDDING: 0})
    for name in ("a", "b", "c"):
        ledger.open(name, Owner.LLM, Footprint(10, 1, 5), priority=1)
    table = ledger.table(Owner.LLM)
    fewer = table.without(["b"]).with_lease("d", Footprint(7, 0, 3), 2)
    assert fewer.ids == ("a", "c", "d")
    assert fewer.base.tolist() == [10, 10, 7]
    assert table.ids == ("a", "b", "c")


def test_memory_held_above_a_lowered_quota_is_not_available_to_others() -> None:
    ledger = MemoryLedger({Owner.LLM: 80, Owner.EMBEDDING: 20})
    lease = ledger.open("a", Owner.LLM, Footprint(80), priority=0)
    ledger.set_quota(Owner.LLM, 30)
    ledger.set_quota(Owner.EMBEDDING, 70)
    assert (ledger.held(Owner.LLM), ledger.ceiling(Owner.EMBEDDING)) == (80, 20)
    with pytest.raises(LedgerInvariantError, match="20 free under the embedding quota"):
        ledger.open("b", Owner.EMBEDDING, Footprint(21), priority=0)
    ledger.set_reported(lease, held=30, per_step=1)
    assert (ledger.held(Owner.LLM), ledger.ceiling(Owner.EMBEDDING)) == (30, 70)
    ledger.open("b", Owner.EMBEDDING, Footprint(70), priority=0)
    ledger.check_integrity()


def test_the_table_grows_beyond_its_first_capacity() -> None:
    ledger = MemoryLedger({Owner.LLM: 1_000, Owner.EMBEDDING: 0})
    leases = [ledger.open(str(i), Owner.LLM, Footprint(i % 7), priority=0) for i in range(200)]
    for lease in leases[::3]:
        ledger.close(lease)
    ledger.check_integrity()
    assert ledger.demanded(Owner.LLM) == sum(i % 7 for i in range(200) if i % 3)


def test_a_quota_is_not_negative() -> None:
    with pytest.raises(ValueError, match="must be 0 or more"):
        MemoryLedger({Owner.LLM: 2, Owner.EMBEDDING: -1})
