"""The device time of steps and passes that overlap."""

import random

import pytest

from controlplane.core.clock import Duration, Instant, milliseconds, to_milliseconds
from controlplane.core.request import Owner
from controlplane.service.prediction.device_time import DeviceTime


def counted(time: DeviceTime, owner: Owner, ended: float, took: float, alone: float) -> float:
    """The same in milliseconds."""
    return to_milliseconds(
        time.count(owner, Instant(milliseconds(ended)), milliseconds(took), milliseconds(alone))
    )


def test_work_beside_nothing_counts_what_it_takes_alone():
    time = DeviceTime()
    assert counted(time, Owner.LLM, 10, 10, 10) == 10
    assert counted(time, Owner.EMBEDDING, 30, 20, 15) == 15
    assert counted(time, Owner.LLM, 40, 10, 10) == 10


def test_a_pass_counts_what_the_steps_beside_it_left():
    """Ten steps of 20 ms, 15 alone, and a pass beside them all: 100 ms by its model, 50 by the clock."""
    time = DeviceTime()
    assert sum(counted(time, Owner.LLM, 20 * n, 20, 15) for n in range(1, 11)) == 150
    assert counted(time, Owner.EMBEDDING, 200, 200, 100) == 50


def test_a_step_counts_what_a_pass_within_it_left():
    time = DeviceTime()
    assert counted(time, Owner.EMBEDDING, 300, 100, 100) == 100
    assert counted(time, Owner.LLM, 500, 500, 500) == 400
    # Half of this step is beside the pass.
    assert counted(time, Owner.LLM, 250, 100, 100) == 50


@pytest.mark.parametrize("seed", range(5))
def test_both_owners_count_at_most_the_time_that_passes(seed: int):
    """Each owner's work follows its own without a break, and its expectation is wrong either way."""
    time, randomness, total = DeviceTime(), random.Random(seed), 0
    ends = dict.fromkeys(Owner, 0)
    took = dict.fromkeys(Owner, 0)
    while max(ends.values()) < milliseconds(10_000):
        owner = min(Owner, key=lambda one: (ends[one], one))
        if took[owner]:
            alone = Duration(int(took[owner] * randomness.uniform(0.3, 1.2)))
            total += time.count(owner, Instant(ends[owner]), Duration(took[owner]), alone)
        took[owner] = milliseconds(randomness.uniform(2, 30 if owner is Owner.LLM else 400))
        ends[owner] += took[owner]
    assert 0.7 * max(ends.values()) < total <= max(ends.values())
