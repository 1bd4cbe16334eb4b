"""The columns of the running batch equal the values of the single requests, after any changes."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant
from controlplane.core.forecast import LengthForecast
from controlplane.core.pool_view import Pace
from controlplane.core.slo import Slo
from controlplane.policy.engine.gate_view_adapter import lease_table
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.request_state import RequestState, memory_time
from controlplane.policy.engine.running_batch import RunningBatch
from tests.example_requests import a_request

LEVELS = (0.0, 0.3, 0.6, 1.0)


def forecast(random: Random) -> LengthForecast:
    """Forecasts, some with coinciding points and some that start at zero tokens."""
    return LengthForecast(LEVELS, tuple(sorted(random.choice([0.0, 1.5, 20.0, 60.0, 200.0]) for _ in LEVELS)))


def newcomer(name: str, random: Random) -> RequestState:
    ttft = random.choice([None, Duration(3), Duration(50)])
    tpot, gap = random.choice([None, Duration(3)]), random.choice([None, Duration(2), Duration(30)])
    slo = Slo(ttft, tpot, random.choice([None, Duration(4), Duration(300)]), gap)
    priority, limit = random.randrange(3), random.choice([1, 30, 400])
    request = a_request(name, random.randint(1, 90), limit, slo=slo, priority=priority)
    one = RequestState(
        request,
        predicted=random.choice([1, 20, 90]),
        forecast=forecast(random) if random.random() < 0.6 else None,
        is_guess=random.random() < 0.2,
    )
    if random.random() < 0.3:
        # It was preempted after some tokens.
        one.stamp(Instant(1), random.randint(1, 300))
    one.held = random.randrange(9)
    return one


SEEN = ("tokens", "held", "first_token", "last_token", "is_missed", "forecast")


def seen(one: RequestState) -> list[object]:
    return [getattr(one, name) for name in SEEN]


Twins = list[tuple[RequestState, RequestState]]
"""Each request twice: in the batch, and as a single state that gets the same updates."""


def twins(name: str, random: Random) -> tuple[RequestState, RequestState]:
    seed = random.random()
    return newcomer(name, Random(seed)), newcomer(name, Random(seed))


def check(batch: RunningBatch, those: Twins, now: Instant, random: Random) -> None:
    alone = [one for _, one in those]
    assert batch.ids == [one.request.id for one in alone]
    assert [batch.ids[at] for at in batch.by_id.argsort()] == sorted(batch.ids)
    assert batch.tokens.tolist() == [one.tokens for one in alone]
    assert batch.held.tolist() == [one.held for one in alone]
    assert batch.priority.tolist() == [one.priority for one in alone]
    assert batch.is_guess.tolist() == [one.is_guess for one in alone]
    assert batch.remaining_tokens().tolist() == [one.remaining() for one in alone]
    assert batch.memory_time().tolist() == [memory_time(one.tokens, one.remaining()) for one in alone]
    step = Duration(random.choice([0, 1, 4]))
    assert batch.is_lost(now, step).tolist() == [one.cannot_meet_slo(now, Duration(0), step) for one in alone]
    assert batch.has_token_of(now).tolist() == [one.last_token == now for one in alone]
    if those and random.random() < 0.5:
        at = random.randrange(len(those))
        assert batch[at] is those[at][0]
        assert seen(batch[at]) == seen(those[at][1])
    if random.random() < 0.2:
        assert list(batch) == [one for one, _ in those]
        assert [seen(one) for one in batch] == [seen(one) for one in alone]


@given(random=st.randoms(use_true_random=True))
def test_columns_equal_the_state_of_each_request(random):
    batch = RunningBatch()
    those: Twins = []
    for step in range(40):
        now = Instant(10 + 2 * step)
        for more in range(random.randrange(3)):
            # Ids in random order.
            those.append(twins(f"r{random.randrange(1_000)}-{step}-{more}", random))
            batch.add(those[-1][0])
        if those and random.random() < 0.3:
            mine, alone = those.pop(at := random.randrange(len(those)))
            assert batch.pop(at) is mine
            assert seen(mine) == seen(alone)
        if those and random.random() < 0.2:
            mine, alone = random.choice(those)
            mine.set_forecast(another := forecast(random))
            alone.set_forecast(another)
            batch.set_forecast(mine)
        for at, (_, alone) in enumerate(those):
            new = random.choice([0, 1, 1, 1, 1, 40]) if step % 3 else 1
            if new:
                alone.stamp(now, new)
            batch.held[at] = alone.held = alone.tokens // 16
        batch.stamp(np.array([alone.tokens for _, alone in those], int), now)
        check(batch, those, now, random)
        if step % 5 == 0:
            gone = random.sample(those, len(those) // 3)
            left, kept = batch.without([mine for mine, _ in gone]), [one for one in those if one not in gone]
            kept.append(twins(f"n{step}", random))
            left.add(kept[-1][0])
            check(left, kept, now, random)
            check(batch, those, now, random)


@pytest.mark.parametrize("packed", [None, 32])
def test_lease_table_has_present_and_predicted_tokens(packed):
    running = [newcomer(f"r{at}", Random(at)) for at in range(20)]
    running[3].block_tokens = packed
    batch = RunningBatch(running)
    view = EngineView(Instant(0), Pace(Duration(0), Duration(0)), 16, 100, 0, 0, 64, batch)
    table = lease_table(batch, view)
    slopes = [16 / (one.block_tokens or 16) for one in running]
    assert table.ids == tuple(one.request.id for one in running)
    assert table.per_step.tolist() == slopes
    assert table.base.tolist() == [
        slope * one.tokens + 15 for slope, one in zip(slopes, running, strict=True)
    ]
    assert table.steps.tolist() == [one.remaining() for one in running]
    assert table.priority.tolist() == [one.priority for one in running]
