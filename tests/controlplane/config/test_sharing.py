"""Conversion of quota shares to bytes of the actual pool."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controlplane.config import parse
from controlplane.config.pool_and_quota import QuotaSection
from controlplane.core.request import Owner
from controlplane.policy.sharing.quota import target_nominal


def section(**quota) -> QuotaSection:
    return parse({"models": {"chat": {"model": "m"}}, "quota": quota}).quota


SHARES = {"llm": {"nominal": 0.75, "min": 0.5, "borrow": 0.1}, "embedding": {"nominal": 0.25, "min": 0.1}}


def sharing(quota, **pool):
    sizes = {"pool_bytes": 1_000, "max_llm_bytes": 1_000, "most_embedding_bytes": 1_000, "block_bytes": 10}
    return quota.sharing(**{**sizes, **pool})


def test_shares_become_bytes_in_whole_blocks():
    found = sharing(section(policy="dynamic", **SHARES, tick_ms=100, max_step=0.05, dead_band=0.02))
    assert found.nominal == {Owner.LLM: 750, Owner.EMBEDDING: 250}
    assert found.options.minimum == {Owner.LLM: 500, Owner.EMBEDDING: 100}
    assert found.options.nominal_llm_bytes == 750
    assert (found.options.rate, found.options.dead_band) == (pytest.approx(0.5), 20)
    assert found.borrow == {Owner.LLM: 100, Owner.EMBEDDING: 0}


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


def test_quotas_change_if_dynamic_or_if_borrowing_is_allowed():
    assert not section().is_dynamic
    assert section(policy="dynamic").is_dynamic
    assert section(**SHARES).is_dynamic
    assert not sharing(section(**SHARES)).follows_urgency
