"""Conversion of quota shares to bytes of the actual pool."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controlplane.config import parse
from controlplane.config.pool_and_quota import QuotaSection
from controlplane.core.request import Owner
from controlplane.policy.sharing.lending import usable_bytes
from controlplane.policy.sharing.quota import target_nominal


def section(**quota) -> QuotaSection:
    return parse({"models": {"chat": {"model": "m"}}, "quota": quota}).quota


SHARES = {"llm": {"nominal": 0.75, "min": 0.5, "borrow": 0.1}, "embedding": {"nominal": 0.25, "min": 0.1}}


def sharing(quota, **pool):
    sizes = {"pool_bytes": 1_000, "max_llm_bytes": 1_000, "most_embedding_bytes": 1_000, "block_bytes": 10}
    largest = {Owner.LLM: 0, Owner.EMBEDDING: 0}
    return quota.sharing(**{"largest_request": largest, **sizes, **pool})


def test_shares_become_bytes_in_whole_blocks():
    found = sharing(section(policy="dynamic", **SHARES, tick_ms=100, max_step=0.05, dead_band=0.02))
    assert found.nominal == {Owner.LLM: 750, Owner.EMBEDDING: 250}
    assert found.options.minimum == {Owner.LLM: 500, Owner.EMBEDDING: 100}
    assert found.options.nominal_llm_bytes == 750
    assert (found.options.rate, found.options.dead_band) == (pytest.approx(0.5), 20)
    assert found.borrow == {Owner.LLM: 100, Owner.EMBEDDING: 1_000}


def test_minimums_that_are_not_stated_hold_the_largest_request_and_a_full_pass():
    largest = {Owner.LLM: 120, Owner.EMBEDDING: 40}
    for most, least in ((1_000, 100), (70, 70), (20, 40)):
        found = sharing(section(), largest_request=largest, most_embedding_bytes=most)
        assert found.options.minimum[Owner.EMBEDDING] == least, f"{most} in a full pass, of 100 nominal"
    found = sharing(section(), largest_request=largest)
    assert found.options.minimum == {Owner.LLM: 120, Owner.EMBEDDING: 100}
    assert found.nominal == {Owner.LLM: 900, Owner.EMBEDDING: 100}
    assert found.follows_urgency
    needed = {Owner.LLM: 0, Owner.EMBEDDING: 1_000}
    assert usable_bytes(found.nominal, needed, found) == {Owner.LLM: 120, Owner.EMBEDDING: 880}


@st.composite
def shares(draw):
    """Shares of both owners; a minimum may be the whole share."""
    llm = draw(st.integers(0, 100)) / 100
    parts = {"llm": llm, "embedding": 1 - llm}
    return {kind: {"nominal": part, "min": part * draw(st.floats(0, 1))} for kind, part in parts.items()}


@given(
    shares(),
    st.integers(2_000, 100_000),
    st.floats(0.1, 1),
    st.floats(0.1, 1),
    st.sampled_from([1, 7, 384]),
)
@example({"llm": {"nominal": 0.96, "min": 0.96}, "embedding": {"nominal": 0.04}}, 2_002, 1.0, 1.0, 384)
def test_without_urgency_the_llm_owns_its_nominal_share(shares, pool, cache, batch, block):
    sizes = {"max_llm_bytes": int(pool * cache), "most_embedding_bytes": int(pool * batch)}
    found = sharing(section(policy="dynamic", **shares), pool_bytes=pool, block_bytes=block, **sizes)
    resting = found.nominal[Owner.LLM]
    assert target_nominal(dict.fromkeys(Owner, 0.0), found.options) == resting
    assert resting <= sizes["max_llm_bytes"]
    wanted = min(int(shares["llm"]["nominal"] * pool), sizes["max_llm_bytes"])
    assert resting > wanted - block


def test_no_owner_gets_more_than_it_can_use():
    found = sharing(section(policy="dynamic", **SHARES), max_llm_bytes=800, most_embedding_bytes=300)
    # A cache of 800 leaves at least 200 to the embeddings, which cannot use more than 300.
    assert found.options.minimum == {Owner.LLM: 700, Owner.EMBEDDING: 200}
    assert (found.options.lowest, found.options.highest) == (700, 800)


BOTH = {"chat": {"model": "m"}, "embeddings": [{"model": "e"}]}
KVCACHED = {"kv_allocator": "kvcached"}
OFF = {"engine": "off"}


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"pool": KVCACHED}, None),
        ({"pool": KVCACHED, "quota": {"policy": "dynamic"}}, None),
        ({"pool": KVCACHED, "quota": {"policy": "static", **SHARES}}, None),
        ({"pool": KVCACHED, "quota": {"policy": "static"}}, "quota.policy: static"),
        ({"pool": KVCACHED, "scheduling": OFF}, "scheduling.engine: off"),
        ({}, "pool.kv_allocator: static cannot give KV memory back"),
        ({"pool": KVCACHED, "models": {"chat": {"model": "m"}}}, "only one kind of model"),
    ],
)
def test_quotas_move_where_bytes_can_move_and_an_engine_policy_keeps_them(sections, reason):
    found = parse({"models": BOTH, **sections}).static_quota_reason()
    assert found is None if reason is None else found is not None and found.startswith(reason)


def test_lending_alone_does_not_follow_urgency():
    found = sharing(section(policy="static", **SHARES))
    assert not found.follows_urgency
    assert found.borrow == {Owner.LLM: 100, Owner.EMBEDDING: 0}
