"""Quota steps: bounded, conserving, monotone, without overshoot; urgency is continuous."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, milliseconds, seconds
from controlplane.core.request import Owner
from controlplane.policy.sharing.quota import (
    QuotaOptions,
    UrgencyOptions,
    apply_dead_band,
    bytes_to_reclaim,
    next_nominals,
    target_nominal,
    urgency_of,
    urgency_of_all,
    use_ceiling,
)

LLM, EMBEDDING = Owner.LLM, Owner.EMBEDDING
PLAIN = QuotaOptions(
    pool=10_000,
    minimum={LLM: 2_000, EMBEDDING: 1_000},
    nominal_llm_bytes=6_900,
    nominal_weight=0.0,
    rate=0.05,
    dead_band=0,
    block_bytes=1,
    urgency=UrgencyOptions(),
)
SECOND = seconds(1)
STEP = 500  # rate x pool x one second

slacks = st.integers(-20_000, 20_000).map(milliseconds)
urgencies = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))


@st.composite
def options(draw: st.DrawFn) -> QuotaOptions:
    block = draw(st.sampled_from([1, 7, 64]))
    pool = draw(st.integers(3 * block, 5_000))
    llm = draw(st.integers(0, pool - 2 * block))
    embedding = draw(st.integers(0, pool - llm - 2 * block))
    return QuotaOptions(
        pool=pool,
        minimum={LLM: llm, EMBEDDING: embedding},
        nominal_llm_bytes=draw(st.integers(-(-llm // block), (pool - embedding) // block)) * block,
        nominal_weight=draw(st.sampled_from([0.0, 0.5])),
        rate=draw(st.floats(0, 0.5)),
        dead_band=draw(st.integers(0, 300)),
        block_bytes=block,
        urgency=UrgencyOptions(),
    )


def split(llm: int, given: QuotaOptions) -> dict[Owner, int]:
    return {LLM: llm, EMBEDDING: given.pool - llm}


@given(options(), st.integers(0, 5_000), urgencies, urgencies, st.integers(0, 4_000))
def test_step_bounds_and_sum(
    given: QuotaOptions, start: int, llm: float, embedding: float, elapsed_ms: int
) -> None:
    assume(start <= given.pool)
    target = target_nominal({LLM: llm, EMBEDDING: embedding}, given)
    after = next_nominals(split(start, given), target, elapsed=milliseconds(elapsed_ms), options=given)
    assert sum(after.values()) == given.pool
    assert after[LLM] >= given.minimum[LLM]
    assert after[EMBEDDING] >= given.minimum[EMBEDDING]
    limit = given.rate * given.pool * elapsed_ms / 1_000
    if given.lowest <= start <= given.highest:
        assert abs(after[LLM] - start) <= limit + 1e-6
        assert min(start, target) <= after[LLM] <= max(start, target)
    assert after[LLM] == start or after[LLM] % given.block_bytes == 0


def test_bounds_win_over_rate() -> None:
    for start, lands in ((0, 2_000), (10_000, 9_000)):
        after = next_nominals(split(start, PLAIN), start, elapsed=milliseconds(1), options=PLAIN)
        assert after[LLM] == lands


@given(options(), st.integers(0, 5_000), urgencies, urgencies)
def test_constant_target_is_reached_without_overshoot(
    given: QuotaOptions, start: int, llm: float, embedding: float
) -> None:
    start = min(max(start // given.block_bytes * given.block_bytes, given.lowest), given.highest)
    step = int(given.rate * given.pool) // given.block_bytes * given.block_bytes
    assume(step > 0)
    target = target_nominal({LLM: llm, EMBEDDING: embedding}, given)
    path = [start]
    for _ in range(-(-abs(target - start) // step)):
        path.append(next_nominals(split(path[-1], given), target, elapsed=SECOND, options=given)[LLM])
    assert path[-1] == target
    assert path in (sorted(path), sorted(path, reverse=True))
    assert all(a != b for a, b in pairwise(path)), "no needless step"
    assert next_nominals(split(target, given), target, elapsed=SECOND, options=given)[LLM] == target


@given(st.integers(2_000, 9_000), st.integers(2_000, 9_000), st.integers(2_000, 9_000))
def test_alternating_target_swings_at_most_one_step(start: int, one: int, other: int) -> None:
    low, high = sorted((one, other))
    path = [start]
    for turn in range(40):
        target = (low, high)[turn % 2]
        path.append(next_nominals(split(path[-1], PLAIN), target, elapsed=SECOND, options=PLAIN)[LLM])
    settled = path[20:]
    assert max(settled) - min(settled) <= STEP


def test_the_dead_band_keeps_the_target_except_at_rest() -> None:
    banded = replace(PLAIN, dead_band=100)
    for wanted, kept in ((5_100, 5_000), (4_900, 5_000), (5_101, 5_101), (4_000, 4_000)):
        assert apply_dead_band(5_000, wanted, banded) == kept
    assert apply_dead_band(6_850, 6_900, banded) == 6_900


@given(options(), st.lists(st.tuples(urgencies, urgencies), max_size=20), st.lists(st.integers(200, 1_500)))
def test_quotas_return_exactly_to_rest(
    given: QuotaOptions, urgent: list[tuple[float, float]], gaps_ms: list[int]
) -> None:
    assume(int(given.rate * given.pool) >= 5 * given.block_bytes)
    target, owned = given.nominal_llm_bytes, split(given.nominal_llm_bytes, given)
    for llm, embedding in [*urgent, *[(0.0, 0.0)] * 50]:
        target = apply_dead_band(target, target_nominal({LLM: llm, EMBEDDING: embedding}, given), given)
        elapsed = milliseconds(gaps_ms.pop() if gaps_ms else 1_000)
        owned = next_nominals(owned, target, elapsed=elapsed, options=given)
    assert owned == split(given.nominal_llm_bytes, given)


def test_rounding_keeps_the_sum() -> None:
    blocks = replace(PLAIN, block_bytes=384, nominal_llm_bytes=6_912)
    after = next_nominals(split(3_840, blocks), 9_000, elapsed=SECOND, options=blocks)
    assert after == {LLM: 4_224, EMBEDDING: 10_000 - 4_224}


def test_a_step_below_one_block_moves_nothing() -> None:
    blocks = replace(PLAIN, block_bytes=512, nominal_llm_bytes=6_656)
    assert next_nominals(split(5_120, blocks), 9_000, elapsed=SECOND, options=blocks)[LLM] == 5_120
    assert next_nominals(split(5_000, blocks), 9_000, elapsed=milliseconds(1), options=blocks)[LLM] == 5_000


@given(options(), urgencies, urgencies, urgencies)
def test_more_urgency_never_lowers_the_target(given: QuotaOptions, a: float, b: float, other: float) -> None:
    low, high = sorted((a, b))
    targets = [target_nominal({LLM: u, EMBEDDING: other}, given) for u in (low, high)]
    assert targets == sorted(targets)
    targets = [target_nominal({LLM: other, EMBEDDING: u}, given) for u in (low, high)]
    if other > 0 or given.nominal_weight > 0:
        assert targets == sorted(targets, reverse=True)


def test_targets_by_hand() -> None:
    assert target_nominal({LLM: 0, EMBEDDING: 0}, PLAIN) == 2_000 + 4_900
    assert target_nominal({LLM: 3, EMBEDDING: 3}, PLAIN) == 2_000 + 4_900, "equally urgent"
    assert target_nominal({LLM: 3, EMBEDDING: 1}, PLAIN) == 2_000 + 5_950
    assert target_nominal({LLM: 0, EMBEDDING: 0.01}, PLAIN) == 2_000
    calm = replace(PLAIN, nominal_weight=1.0)
    assert target_nominal({LLM: 0, EMBEDDING: 1}, calm) == 2_000 + 2_450, "half way from rest"


@given(slacks, slacks)
def test_urgency_grows_as_slack_shrinks(a: Duration, b: Duration) -> None:
    less, more = sorted((a, b))
    assert urgency_of(less, UrgencyOptions()) >= urgency_of(more, UrgencyOptions())


def test_urgency_is_continuous_and_capped() -> None:
    given = UrgencyOptions(critical=seconds(2), critical_weight=3.0)
    assert urgency_of(seconds(2), given) == 0.0
    assert urgency_of(seconds(1), given) == 1.5
    assert urgency_of(Duration(0), given) == 3.0
    assert urgency_of(Duration(1), given) == pytest.approx(3.0, abs=1e-7)
    assert urgency_of(seconds(-4), given) == 3.0, "counted once, however late"


def test_the_urgency_of_an_owner_is_the_mean_over_its_requests() -> None:
    some = [seconds(0.5), seconds(0), seconds(5)]
    assert urgency_of_all(some, UrgencyOptions()) == 0.5
    assert urgency_of_all([], UrgencyOptions()) == 0.0
    assert urgency_of_all(some, UrgencyOptions(), rejected=2, arrived=7) == 0.5, "two were served on time"


def test_only_demand_reclaims() -> None:
    assert bytes_to_reclaim(held=900, nominal=500, free=0, demanded=0) == 0
    assert bytes_to_reclaim(held=900, nominal=500, free=50, demanded=200) == 150
    assert bytes_to_reclaim(held=900, nominal=500, free=0, demanded=1_000) == 400
    assert bytes_to_reclaim(held=300, nominal=500, free=0, demanded=1_000) == 0


sizes = st.integers(0, 1_000)


@given(quota=sizes, former=sizes, used=sizes, growth=sizes)
def test_the_use_ceiling_never_rises_above_quota_and_former_ceiling(quota, former, used, growth):
    ceiling = use_ceiling(quota, former, used=used, growth=growth)
    assert quota <= ceiling <= max(quota, former)
    assert ceiling >= min(used + growth, former) or used <= quota


@given(
    quota=sizes,
    former=sizes,
    course=st.lists(st.tuples(sizes, sizes), min_size=1, max_size=20),
)
def test_a_shrink_leaves_running_requests_what_they_may_need_and_ends_at_the_quota(quota, former, course):
    """The running requests grow as predicted and end one after another; nothing starts above the quota."""
    ceiling = former
    used = min(former, sum(held for held, _ in course))
    for held, growth in course:
        before, ceiling = ceiling, use_ceiling(quota, ceiling, used=used, growth=growth)
        assert ceiling <= max(quota, before)
        assert used <= max(quota, ceiling)
        used = max(0, min(used + growth, ceiling) - held - growth)
    assert use_ceiling(quota, ceiling, used=min(used, quota), growth=0) == quota
