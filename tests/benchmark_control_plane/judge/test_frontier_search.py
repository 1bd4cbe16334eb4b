import pytest

from benchmark_control_plane.judge.frontier_search import highest_load, is_decided

CURVE = {0.5: 1.0, 1.0: 0.95, 1.5: 0.75, 2.0: 0.95}


def falling(load):
    return min(1.0, max(0.0, 1.6 - 0.5 * load))


def test_attainment_is_interpolated_linearly():
    assert highest_load(CURVE, 0.9, steps=0, attainment_at=falling) == pytest.approx(1.125)


def test_recovered_attainment_is_ignored():
    assert highest_load(CURVE, 0.8, steps=0, attainment_at=falling) == pytest.approx(1.375)


def test_bisection_finds_the_crossing():
    asked = []

    def attainment_at(load):
        asked.append(load)
        return falling(load)

    measured = {0.5: falling(0.5), 4.0: falling(4.0)}
    assert highest_load(measured, 0.9, steps=8, attainment_at=attainment_at) == pytest.approx(1.4, abs=0.01)
    assert len(asked) == 8


def test_below_the_lowest_load_a_measurement_is_needed():
    measured = {2.0: falling(2.0)}
    assert highest_load(measured, 0.9, steps=0, attainment_at=falling) is None
    assert highest_load(measured, 0.9, steps=6, attainment_at=falling) == pytest.approx(1.4, abs=0.02)
    assert highest_load(measured, 0.9, steps=6, attainment_at=lambda load: 0.0) is None
    assert highest_load(measured, 0.9, steps=6, attainment_at=lambda load: None) is None


def test_highest_load_is_returned_if_all_reach_the_target():
    assert highest_load({0.5: 1.0, 1.0: 0.92}, 0.9, steps=3, attainment_at=falling) == 1.0


@pytest.mark.parametrize(
    ("measured", "is_known"),
    [
        ({0.5: 1.0, 1.0: 0.95, 1.5: 0.7}, True),
        # The crossing is within the interval of the load that is missing.
        ({0.5: 1.0, 1.5: 0.7}, False),
        # The highest load that is measured is no bound if a higher one is missing.
        ({0.5: 1.0, 1.0: 0.95}, False),
        ({1.0: 0.7, 1.5: 0.6}, False),
        ({}, False),
        # A missing load changes nothing below one that reaches the target, or above one that misses it.
        ({1.0: 0.95, 1.5: 0.7}, True),
        ({0.5: 1.0, 1.0: 0.7}, True),
        # A bisection has closed the gap.
        ({0.5: 1.0, 1.2: 0.92, 1.5: 0.7}, True),
    ],
)
def test_a_rate_is_known_if_no_planned_load_is_missing_around_it(measured, is_known):
    assert is_decided(measured, (0.5, 1.0, 1.5), 0.9) is is_known
