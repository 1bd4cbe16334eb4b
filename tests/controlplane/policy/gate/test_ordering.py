"""Ranks of the waiting queue: which of two requests goes first, and by how much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant
from controlplane.core.memory_ledger import Footprint
from controlplane.core.pool_view import Pace
from controlplane.core.request import Request
from controlplane.core.slo import Slo
from controlplane.policy.gate.ordering import (
    EarliestDeadline,
    Fcfs,
    LeastSlack,
    OrderingOptions,
    ShortestOutput,
    work_before_deadline,
)
from controlplane.policy.registry import OrderingFactory
from tests.example_requests import a_request

# A unit of priority is worth 100, and a request without an objective is due after 5,000.
OPTIONS = OrderingOptions(Duration(100), Duration(5_000))
PACE = Pace(step=Duration(10), per_prompt_token=Duration(2))
ANSWER = Footprint(base=1, per_step=1, steps=40)


def asked(
    arrival: int = 1_000, *, priority: int = 0, prompt: int = 30, cached: int = 0, **objectives: int
) -> Request:
    slo = Slo(**{name: Duration(value) for name, value in objectives.items()})
    return a_request(
        "r", prompt, 64, arrival=Instant(arrival), slo=slo, priority=priority, cached_tokens=cached
    )


@pytest.mark.parametrize(
    ("ordering", "request_", "first"),
    [
        (Fcfs, asked(), 1_000),
        (Fcfs, asked(priority=3, ttft=500), 1_000 - 300),
        (EarliestDeadline, asked(priority=3, ttft=500), 1_500 - 300),
        (EarliestDeadline, asked(ttft=500, e2e=400), 1_400),
        (EarliestDeadline, asked(priority=2), 6_000 - 200),
        # The prefill of 30 tokens and one step are 70; the cached part of the prompt takes no time.
        (LeastSlack, asked(priority=3, ttft=500), 1_500 - 70 - 300),
        (LeastSlack, asked(ttft=500, cached=20), 1_500 - 30),
        (LeastSlack, asked(priority=2), 6_000 - 70 - 200),
        # With e2e alone all of the 40 steps come before the deadline.
        (LeastSlack, asked(e2e=900), 1_900 - 460),
        (LeastSlack, asked(ttft=500, e2e=900), 1_500 - 70),
        (ShortestOutput, asked(priority=3, ttft=500), 40),
    ],
)
def test_the_rank_of_a_request(ordering: OrderingFactory, request_: Request, first: int) -> None:
    assert ordering(OPTIONS).rank(request_, ANSWER, PACE) == (first, 1_000, "r")


def test_no_work_is_predicted_before_a_step_was_observed_and_none_after_the_vectors_of_a_call() -> None:
    assert work_before_deadline(asked(ttft=500), ANSWER, None) == 0
    # An embedding call has no steps that grow, so its e2e time covers one pass.
    assert work_before_deadline(asked(e2e=900), Footprint(base=1, steps=40), PACE) == 70


@pytest.mark.parametrize("ordering", [Fcfs, EarliestDeadline, LeastSlack])
@given(
    arrivals=st.tuples(st.integers(0, 3_000), st.integers(0, 3_000)),
    priorities=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_a_request_goes_first_unless_the_other_leads_by_more_than_its_head_start(
    ordering: OrderingFactory, arrivals: tuple[int, int], priorities: tuple[int, int]
) -> None:
    """Two requests that differ only in arrival and class."""
    one, other = (
        ordering(OPTIONS).rank(asked(at, priority=of, ttft=500), ANSWER, PACE)
        for at, of in zip(arrivals, priorities, strict=True)
    )
    lead = arrivals[1] - arrivals[0] + 100 * (priorities[0] - priorities[1])
    assert (one < other) == (lead > 0 or (lead == 0 and arrivals[0] < arrivals[1]))
