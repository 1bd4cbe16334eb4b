"""What a second of the device is worth to generations, and which embedding calls are rejected for it."""

import pytest

from controlplane.core.clock import after, seconds
from controlplane.core.decision import Reason
from controlplane.policy.gate.time_price import TimePrice
from tests.controlplane.policy.gate.test_moore_hodgson import BACKUP, INDEX, NIGHT, NOW, SEARCH, decided


def priced(met: int, lacking: int, others_missed: int = 0) -> TimePrice:
    """The price after so many generations of weight 3, each of which takes 0.2 s of the device."""
    price = TimePrice()
    for count, lacked in ((met, False), (lacking, True), (others_missed, False)):
        for _ in range(count):
            price.record(NOW, weight=3.0, needed=0.2, lacked_time=lacked)
    return price


@pytest.mark.parametrize(
    ("met", "lacking", "expected"),
    [(20, 0, 0.0), (19, 1, 0.0), (11, 9, 40 / 3), (10, 10, 15.0), (0, 20, 15.0), (0, 0, 0.0)],
)
def test_a_second_is_worth_what_generations_meet_in_it_once_it_would_be_used(met, lacking, expected):
    assert priced(met, lacking).per_second(NOW) == pytest.approx(expected)


def test_misses_for_another_reason_give_time_no_price():
    assert priced(10, 0, others_missed=10).per_second(NOW) == 0.0


def test_the_price_follows_the_last_three_seconds():
    price = priced(0, 20)
    later = after(NOW, seconds(3))
    for _ in range(20):
        price.record(later, weight=3.0, needed=0.2, lacked_time=False)
    # Of the misses 1 / e is left, 26.9 % of the requests.
    assert price.per_second(later) == pytest.approx(15.0 * (0.269 - 0.05) / 0.45, rel=0.01)
    assert price.per_second(after(later, seconds(15))) == 0.0, "too little is remembered"


def rejected(asked, *, price: float, is_shared: bool = True) -> dict[str, Reason]:
    """Reasons by id; a call takes 0.1 s per 1,000 tokens."""
    plan = decided([], asked, is_shared=is_shared, time_price=price)
    return {name: reject.reason for name, reject in plan.rejections}


def test_a_call_that_is_worth_less_than_its_time_is_rejected():
    """Of weight 1, 0.9 s at a price of 1 are worth it, and at 1.2 they are not."""
    assert rejected([(INDEX, 9_000)], price=1.0) == {}
    assert rejected([(INDEX, 9_000)], price=1.2) == {"w0": Reason.DEVICE_TIME}


def test_small_calls_and_calls_of_weight_stay_at_the_same_price():
    assert rejected([(INDEX, 9_000), (INDEX, 1_000)], price=2.0) == {"w0": Reason.DEVICE_TIME}
    assert SEARCH.weight == 2 * INDEX.weight
    assert rejected([(SEARCH, 9_000)], price=2.0) == {}


def test_calls_that_nothing_is_promised_or_that_must_be_served_stay():
    assert rejected([(BACKUP, 9_000)], price=100.0) == {}
    assert rejected([(NIGHT, 9_000)], price=100.0) == {}


def test_without_generations_time_costs_nothing():
    assert rejected([(INDEX, 9_000)], price=100.0, is_shared=False) == {}


def test_the_rejection_names_both_sides_and_comes_with_the_time_in_which_the_price_changes():
    plan = decided([], [(INDEX, 9_000)], is_shared=True, time_price=4.0)
    reject = plan.rejections[0][1]
    assert reject.retry_after == seconds(3)
    assert reject.detail == (
        "it takes 0.9 s of the device, in which generations meet 3.6 weighted objectives, "
        "and its class weighs 1"
    )


def test_a_call_that_is_rejected_for_its_cost_takes_no_time_from_others():
    """Both cannot be in time, so the larger one would be rejected as late; it is gone already."""
    plan = decided([], [(INDEX, 12_000), (INDEX, 9_000)], is_shared=True, time_price=1.0)
    assert [(name, reject.reason) for name, reject in plan.rejections] == [("w0", Reason.DEVICE_TIME)]
