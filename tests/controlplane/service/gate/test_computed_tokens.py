"""Tokens of a request that count for its tenant."""

import pytest

from controlplane.core.clock import Instant
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.service.gate.accounting import computed_tokens

CHAT = ServiceClass("chat", Slo(), 0, sheddable=True)


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
    asked = Request("r", Kind.GENERATE, "m", "a", CHAT, Slo(), Instant(0), 100, 50, sequences)
    assert computed_tokens(asked, outcome, output) == tokens
