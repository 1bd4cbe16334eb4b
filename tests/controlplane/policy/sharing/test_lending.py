"""Lending between the owners: memory is conserved, limits hold, needed memory comes back."""

from hypothesis import example, given
from hypothesis import strategies as st

from controlplane.core.request import Owner
from controlplane.policy.sharing.lending import (
    OTHER,
    Sharing,
    split_among_models,
    target_next,
    usable_bytes,
)
from controlplane.policy.sharing.quota import QuotaOptions, UrgencyOptions

LLM, EMBEDDING = Owner.LLM, Owner.EMBEDDING
POOL = 1_000


def sharing(*, block=10, follows_urgency=True, borrow=(300, 300), lend=(200, 100)) -> Sharing:
    options = QuotaOptions(
        pool=POOL, minimum={LLM: 400, EMBEDDING: 50}, nominal_llm_bytes=780, nominal_weight=1.0, rate=1.0,
        dead_band=0, block_bytes=block, urgency=UrgencyOptions(),
    )  # fmt: skip
    return Sharing(
        options,
        borrow=dict(zip(Owner, borrow, strict=True)),
        lend=dict(zip(Owner, lend, strict=True)),
        follows_urgency=follows_urgency,
    )


def test_unneeded_memory_is_lent_to_the_owner_that_is_short():
    owned = {LLM: 800, EMBEDDING: 200}
    assert usable_bytes(owned, {LLM: 900, EMBEDDING: 120}, sharing()) == {LLM: 880, EMBEDDING: 120}
    assert usable_bytes(owned, {LLM: 500, EMBEDDING: 900}, sharing()) == {LLM: 600, EMBEDDING: 400}


def test_needed_memory_is_not_lent_and_no_owner_borrows_without_need():
    owned = {LLM: 800, EMBEDDING: 200}
    assert usable_bytes(owned, {LLM: 900, EMBEDDING: 200}, sharing()) == owned
    assert usable_bytes(owned, {LLM: 700, EMBEDDING: 0}, sharing()) == owned


@given(
    llm=st.integers(40, 95).map(lambda n: n * 10),
    needs=st.tuples(st.integers(0, 2_000), st.integers(0, 2_000)),
    borrow=st.tuples(st.integers(0, 500), st.integers(0, 500)),
    lend=st.tuples(st.integers(0, 400), st.integers(0, 50)),
)
@example(llm=600, needs=(0, 2_000), borrow=(500, 500), lend=(400, 50))
def test_lending_conserves_memory_and_respects_its_limits(llm, needs, borrow, lend):
    rules = sharing(borrow=borrow, lend=lend)
    owned, needed = {LLM: llm, EMBEDDING: POOL - llm}, dict(zip(Owner, needs, strict=True))
    usable = usable_bytes(owned, needed, rules)
    assert sum(usable.values()) == POOL
    assert usable[LLM] % rules.options.block_bytes == 0
    for owner, other in OTHER.items():
        gained = usable[owner] - owned[owner]
        assert gained <= min(rules.borrow[owner], rules.lend[other])
        assert usable[owner] >= min(owned[owner], rules.options.minimum[owner])
        if gained > 0:
            assert usable[other] >= needed[other], "a lender keeps what it needs"


def test_the_target_follows_urgency_only_if_configured():
    urgent = {LLM: 0.0, EMBEDDING: 9.0}
    assert target_next(800, urgent, sharing()) == 430
    assert target_next(800, urgent, sharing(follows_urgency=False)) == 780


def models():
    """(least, full) of some models; the full workspace holds at least the longest input."""
    one = st.tuples(st.integers(1, 500), st.integers(0, 5_000)).map(lambda m: (m[0], m[0] + m[1]))
    return st.lists(one, min_size=1, max_size=5)


@given(models(), st.integers(0, 30_000))
def test_each_model_fits_its_longest_input_and_the_sum_fits_the_budget(sizes, budget):
    least, full = zip(*sizes, strict=True)
    shares = split_among_models(budget, least, full)
    assert sum(shares) <= budget < sum(shares) + len(shares)
    if budget >= sum(least):
        assert all(share >= one for share, one in zip(shares, least, strict=True))
    assert budget != sum(full) or shares == list(full)


@given(models(), st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_larger_budget_reduces_no_part(sizes, budget, more):
    least, full = zip(*sizes, strict=True)
    for before, now in zip(
        split_among_models(budget, least, full), split_among_models(budget + more, least, full), strict=True
    ):
        assert now >= before


def test_the_rest_is_divided_by_usable_bytes():
    assert split_among_models(1_000, [100, 100], [200, 1_000]) == [180, 820]
    assert split_among_models(100, [100, 300], [200, 1_000]) == [25, 75], "less than the longest inputs take"
    assert split_among_models(1_000, [100, 300], [100, 300]) == [250, 750], "more than the models can use"
