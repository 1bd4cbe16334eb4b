"""What the size cut makes of arrivals: who is too large, and what is left over for whom no promise binds."""

from math import inf

import pytest

from controlplane.core.clock import Instant, milliseconds
from controlplane.policy.engine.size_cutoff import SizeCutoff

MEMORY = 10_000
STEP = milliseconds(10)


def seen(*, load: float, tokens: int, share: float = 0.75, count: int = 200) -> SizeCutoff:
    """After arrivals alike that keep `load` of the memory resident, each with `tokens` at its end."""
    cut = SizeCutoff(window=count, share=share)
    size = 100.0 * tokens
    apart = milliseconds(10 * size / (load * MEMORY) * count / (count - 1))
    for number in range(count):
        cut.arrived(Instant(number * apart), size, tokens)
    cut.update(MEMORY, STEP, use=share)
    return cut


def test_the_cut_is_at_the_size_where_arrivals_fill_the_share():
    assert seen(load=0.7, tokens=100).size == inf
    assert seen(load=0.8, tokens=100).size == 100.0 * 100


@pytest.mark.parametrize(
    ("load", "tokens", "spare"),
    # A deviation of what is present at random is sqrt(load * tokens / memory) of the memory; half is kept.
    [(0.5, 100, 0.5 - 0.0354), (0.5, 1_250, 0.5 - 0.125), (0.8, 5_000, 0.2 - 0.316), (1.2, 100, -0.255)],
)
def test_what_is_left_over_is_less_where_few_requests_fill_the_memory(load, tokens, spare):
    assert seen(load=load, tokens=tokens).spare == pytest.approx(spare, abs=1e-3)


def test_all_is_left_over_until_something_is_known():
    cut = SizeCutoff(window=200, share=0.75)
    cut.arrived(Instant(0), 1e9, 2_000)
    cut.update(MEMORY, STEP, use=0.0)
    assert (cut.spare, cut.size) == (1.0, inf)
