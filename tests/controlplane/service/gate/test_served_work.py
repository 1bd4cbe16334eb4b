"""Attainment of the last minute and tokens by tenant."""

import pytest

from controlplane.core.clock import Instant, seconds
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.service.gate.served_work import ServedWork

CHAT = ServiceClass("chat", Slo(), 0, sheddable=True)


def request(tenant: str = "a", sequences: int = 1) -> Request:
    return Request("r", Kind.GENERATE, "m", tenant, CHAT, Slo(), Instant(0), 100, 50, sequences)


def at(second: float) -> Instant:
    return Instant(seconds(second))


def test_attainment_counts_rejections_as_misses_and_not_what_clients_ended() -> None:
    work = ServedWork()
    for outcome in (Outcome.MET, Outcome.MET, Outcome.LATE, Outcome.REJECTED, Outcome.ABORTED):
        work.ended(request(), outcome, 10, at(1))
    assert work.attainment(at(2)) == {"chat": 0.5}


def test_what_ended_more_than_a_minute_ago_is_forgotten() -> None:
    work = ServedWork()
    work.ended(request(), Outcome.REJECTED, 0, at(0))
    work.ended(request(), Outcome.MET, 10, at(50))
    assert work.attainment(at(55)) == {"chat": 0.5}
    assert work.attainment(at(70)) == {"chat": 1.0}
    assert work.attainment(at(200)) == {}


@pytest.mark.parametrize(
    ("outcome", "output", "sequences", "tokens"),
    [
        (Outcome.MET, 10, 1, 110),
        (Outcome.LATE, 10, 3, 130),
        (Outcome.ABORTED, 5, 1, 105),
        (Outcome.ABORTED, 0, 1, 0),
    ],
)
def test_a_tenant_is_charged_what_was_computed(
    outcome: Outcome, output: int, sequences: int, tokens: int
) -> None:
    work = ServedWork()
    work.ended(request(sequences=sequences), outcome, output, at(0))
    assert sum(work.tokens.values()) == tokens
