"""Tokens of a request that count for its tenant."""

import pytest

from controlplane.core.decision import Outcome
from controlplane.service.gate.accounting import computed_tokens
from tests.example_requests import a_request


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
    asked = a_request("r", 100, 50, sequences=sequences)
    assert computed_tokens(asked, outcome, output) == tokens
