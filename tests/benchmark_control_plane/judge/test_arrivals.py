import numpy as np
import pytest

from benchmark_control_plane.judge.arrivals import bursts, times, wave


def drawn(rate, duration, seed=0, **shape):
    return times(np.random.default_rng(seed), rate, duration, **shape)


@pytest.mark.parametrize("variation", [0, 0.5, 1, 4])
@pytest.mark.parametrize("shape", [None, bursts(1, 4), wave(7, 0.8)])
def test_mean_rate(variation, shape):
    counts = [len(drawn(20, 200, seed, variation=variation, shape=shape)) for seed in range(20)]
    assert np.mean(counts) == pytest.approx(4_000, rel=0.05)


def test_coefficient_of_variation_of_the_gaps():
    gaps = np.diff(drawn(10, 5_000, variation=3))
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(3, rel=0.1)


def test_even_arrivals_are_even():
    assert np.diff(drawn(8, 10, variation=0)) == pytest.approx(1 / 8)


def test_no_arrivals_between_bursts():
    at = np.array(drawn(5, 100, shape=bursts(1, 4)))
    # The phase is random, so the occupied part of the period is searched for.
    phases = np.sort(at % 5)
    widest = max(np.diff(np.append(phases, phases[0] + 5)))
    assert widest >= 3.9


def test_wave_modulates_the_rate():
    at = np.array(drawn(50, 400, shape=wave(10, 0.9)))
    per_phase = np.histogram(at % 10, bins=10)[0]
    assert per_phase.max() > 3 * per_phase.min()


def test_same_seed_gives_the_same_sequence_at_every_rate():
    slow, fast = drawn(2, 100, seed=5), drawn(4, 50, seed=5)
    assert [2 * at for at in fast] == pytest.approx(slow)


def test_no_arrivals_at_rate_zero():
    assert drawn(0, 10) == []
