"""Shares of a file become bytes of the pool that there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.config import parse
from controlplane.config.memory import QuotaSection
from controlplane.core.request import Owner
from controlplane.policy.quota import target_nominal


def section(**quota) -> QuotaSection:
    return parse({"models": {"chat": {"model": "m"}}, "quota": quota}).quota


SHARES = {"llm": {"nominal": 0.75, "min": 0.5, "borrow": 0.1}, "embedding": {"nominal": 0.25, "min": 0.1}}


def sharing(quota, **pool):
    sizes = {"pool_bytes": 1_000, "most_llm_bytes": 1_000, "most_embedding_bytes": 1_000, "block_bytes": 10}
    return quota.sharing(**{**sizes, **pool})


def test_shares_become_bytes_in_whole_blocks():
    found = sharing(section(policy="dynamic", **SHARES, tick_ms=100, max_step=0.05, dead_band=0.02))
    assert found.nominal == {Owner.LLM: 750, Owner.EMBEDDING: 250}
    assert found.options.minimum == {Owner.LLM: 500, Owner.EMBEDDING: 100}
    assert found.options.resting == 750
    assert (found.options.rate, found.options.dead_band) == (pytest.approx(0.5), 20)
    assert found.borrow == {Owner.LLM: 100, Owner.EMBEDDING: 0}


@given(
    st.integers(0, 100).map(lambda n: n / 100),
    st.floats(0, 1),
    st.integers(2_000, 100_000),
    st.sampled_from([1, 7, 384]),
)
def test_at_rest_the_llm_has_its_nominal_share_to_the_last_block(nominal, part, pool, block):
    quota = section(
        policy="dynamic",
        llm={"nominal": nominal, "min": nominal * part},
        embedding={"nominal": 1 - nominal, "min": 0.0},
    )
    found = sharing(quota, pool_bytes=pool, most_llm_bytes=pool, most_embedding_bytes=pool, block_bytes=block)
    assert target_nominal(dict.fromkeys(Owner, 0.0), found.options) == found.nominal[Owner.LLM]


def test_nobody_is_given_what_it_cannot_use():
    found = sharing(section(policy="dynamic", **SHARES), most_llm_bytes=800, most_embedding_bytes=300)
    # A cache of 800 leaves 200 to the embeddings at least; more than 300 they have no use for.
    assert found.options.minimum == {Owner.LLM: 700, Owner.EMBEDDING: 200}
    assert (found.options.lowest, found.options.highest) == (700, 800)


def test_quotas_move_if_they_are_dynamic_or_somebody_may_borrow():
    assert not section().moves
    assert section(policy="dynamic").moves
    assert section(**SHARES).moves
    assert not sharing(section(**SHARES)).follows_urgency


def test_minimums_above_the_pool_are_named():
    with pytest.raises(ValueError, match=r"quota.embedding.minimum=600: minimums must fit into the pool"):
        section(llm={"nominal": 0.5, "min": 0.5}, embedding={"nominal": 0.5, "min": 0.5}).sharing(
            pool_bytes=1_000, most_llm_bytes=400, most_embedding_bytes=600, block_bytes=300
        )
