"""Size cutoff and spare memory after a sequence of arrivals."""

from math import exp, inf

import pytest

from controlplane.core.clock import Instant, milliseconds
from controlplane.policy.engine.size_cutoff import SizeCutoff

MEMORY = 10_000
STEP = milliseconds(10)


def cutoff_after(*, load: float, tokens: int, share: float = 0.75, count: int = 200) -> SizeCutoff:
    """The cutoff after equal arrivals that keep `load` of the memory resident, `tokens` each at the end."""
    cut = SizeCutoff(window=count, share=share)
    size = 100.0 * tokens
    apart = milliseconds(10 * size / (load * MEMORY) * count / (count - 1))
    for number in range(count):
        cut.arrived(Instant(number * apart), size, tokens)
    cut.update(Instant((count - 1) * apart), MEMORY, STEP, use=share)
    return cut


def test_the_cutoff_is_where_arrivals_fill_the_share():
    assert cutoff_after(load=0.7, tokens=100).size == inf
    assert cutoff_after(load=0.8, tokens=100).size == 100.0 * 100


@pytest.mark.parametrize(
    ("load", "tokens", "spare"),
    # The standard deviation of the load is sqrt(load * tokens / memory) of the memory; half is kept free.
    [(0.5, 100, 0.5 - 0.0354), (0.5, 1_250, 0.5 - 0.125), (0.8, 5_000, 0.2 - 0.316), (1.2, 100, -0.255)],
)
def test_spare_memory_is_smaller_where_few_large_requests_fill_the_memory(load, tokens, spare):
    assert cutoff_after(load=load, tokens=tokens).spare == pytest.approx(spare, abs=1e-3)


def test_all_memory_is_spare_before_enough_arrivals():
    cut = SizeCutoff(window=200, share=0.75)
    cut.arrived(Instant(0), 1e9, 2_000)
    cut.update(Instant(0), MEMORY, STEP, use=0.0)
    assert (cut.spare, cut.size) == (1.0, inf)


def test_memory_becomes_spare_after_the_last_arrival():
    cut = cutoff_after(load=1.2, tokens=100, count=40)
    assert cut.spare < 0 and cut.size < inf
    last, gap = cut._arrived[-1], cut._arrived[1] - cut._arrived[0]
    cut.update(Instant(last + 7 * gap), MEMORY, STEP, use=0.75)
    assert cut.spare < 0, "eight arrivals have not been missed yet"
    for missed in (8, 40, 120):
        before = cut.spare
        cut.update(Instant(last + missed * gap), MEMORY, STEP, use=0.75)
        assert cut.spare > before
    # 40 arrivals in the time of 160 are a quarter of the load.
    assert cut.spare > 0.65 and cut.size == inf


def carry_on(cut: SizeCutoff, count: int, *, use: float) -> None:
    """So many more of the same arrivals, each with a step that finds this share of the memory in use."""
    gap = cut._arrived[1] - cut._arrived[0]
    for _ in range(count):
        cut.arrived(now := Instant(cut._arrived[-1] + gap), cut._sizes[-1], cut._tokens[-1])
        cut.update(now, MEMORY, STEP, use)


def test_the_cutoff_rises_while_memory_stays_emptier_than_planned_and_falls_when_it_is_full():
    """Six times as much arrives as the memory serves, so there is a cutoff all the time."""
    cut = cutoff_after(load=6.0, tokens=100)
    assert (cut.correction, cut.size) == (1.0, 10_000.0)
    carry_on(cut, 8, use=0.0)
    # 0.6 of the memory is missing beyond the slack.
    assert cut.correction == pytest.approx(exp(-2 * 0.6), rel=0.02)
    for _ in range(400):
        cut.update(cut._arrived[-1], MEMORY, STEP, use=1.0)
    corrections = [cut.correction]
    for _ in range(12):
        carry_on(cut, 8, use=1.0)
        corrections.append(cut.correction)
    assert corrections == sorted(corrections) and corrections[1] > corrections[0]
    assert corrections[-1] == 1.0


def test_without_a_cutoff_the_correction_returns_to_one():
    cut = cutoff_after(load=1.2, tokens=100)
    carry_on(cut, 8, use=0.0)
    least = cut.correction
    assert least < 0.5 and cut.size == inf
    carry_on(cut, 8, use=0.0)
    assert cut.correction == pytest.approx(least + (1 - least) / 8)
