"""The least patient request decides, and nobody's pause exceeds one objective."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration
from controlplane.policy.decode_slack import Decoding, decode_slack

D = Duration
DECODING = st.builds(
    Decoding, st.none() | st.integers(-100, 1_000).map(D), st.none() | st.integers(1, 300).map(D)
)


@pytest.mark.parametrize(
    ("running", "slack"),
    [
        ([], None),
        ([(None, None)], None),
        ([(500, 100)], 90),
        ([(40, 100)], 30),
        ([(500, None)], 490),
        ([(500, 100), (None, None), (70, 200)], 60),
        ([(-5, 100)], 0),
        ([(8, 100)], 0),
    ],
)
def test_the_least_gap_less_the_engines_own_step(running, slack):
    assert decode_slack([Decoding(*one) for one in running], D(10)) == slack


@given(st.lists(DECODING, max_size=6), DECODING, st.integers(0, 50).map(D))
def test_one_more_request_never_lengthens_it(running, one_more, step):
    before, after = decode_slack(running, step), decode_slack([*running, one_more], step)
    if before is not None:
        assert after is not None
        assert 0 <= after <= before
