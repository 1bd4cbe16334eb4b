"""Tests of forecast scores per class."""

from math import log

import pytest

from predictors.calibration import Calibration, TimeCalibration


def state(calibration, request_id, median, upper):
    calibration.record_forecast(request_id, (0.5, 0.9), (median, upper))


def test_coverage_error_and_bias_by_class():
    calibration = Calibration()
    for number, tokens in enumerate((5, 20, 11, 10)):
        state(calibration, f"r{number}", 8.0, 10.0)
        calibration.record_outcome(f"r{number}", "chat", tokens)
    state(calibration, "other", 1.0, 1.0)
    calibration.record_outcome("other", "batch", 3)
    assert calibration.coverage() == {"chat": 0.5, "batch": 0.0}
    assert calibration.mean_absolute_error() == {"chat": pytest.approx(5.0), "batch": 2.0}
    assert calibration.bias() == {"chat": pytest.approx(-3.5), "batch": -2.0}


def test_pinball_loss_by_hand():
    calibration = Calibration()
    state(calibration, "r", 8.0, 10.0)
    calibration.record_outcome("r", "chat", 5)
    assert calibration.pinball() == {"chat": pytest.approx((0.5 * 3 + 0.1 * 5) / 2)}


def test_drift_compares_recent_outcomes_with_the_window():
    calibration = Calibration()
    for number in range(16):
        state(calibration, f"r{number}", 10.0, 20.0)
        calibration.record_outcome(f"r{number}", "chat", 10 if number < 14 else 40)
    assert calibration.drift() == {"chat": pytest.approx(log(4) * (1 - 2 / 16))}


def test_only_the_window_counts():
    calibration = Calibration(window=2)
    for number, tokens in enumerate((100, 1, 1)):
        state(calibration, f"r{number}", 1.0, 10.0)
        calibration.record_outcome(f"r{number}", "chat", tokens)
    assert calibration.coverage() == {"chat": 1.0}
    assert calibration.mean_absolute_error() == {"chat": pytest.approx(0.0)}


def test_first_forecast_of_a_request_is_scored():
    calibration = Calibration()
    state(calibration, "r", 5.0, 9.0)
    state(calibration, "r", 50.0, 90.0)
    calibration.record_outcome("r", "chat", 10)
    assert calibration.coverage() == {"chat": 0.0}


def test_forecasts_without_outcome_are_dropped():
    calibration = Calibration(forget_after=2)
    for number in range(3):
        state(calibration, f"r{number}", 1.0, 1.0)
    calibration.record_outcome("r0", "chat", 5)
    assert calibration.coverage() == {}
    calibration.record_outcome("r1", "chat", 1)
    assert calibration.coverage() == {"chat": 1.0}


def test_times_are_compared_with_the_expected_ones_and_forgotten():
    times = TimeCalibration(memory=4)
    assert times.ratio is times.error is None
    for took in (1.0, 3.0):
        times.record(2.0, took)
    assert times.ratio == pytest.approx((0.75 * 1 + 3) / (0.75 * 2 + 2))
    assert times.error == pytest.approx((0.75 * 1 + 1) / (0.75 * 2 + 2))
    for _ in range(100):
        times.record(2.0, 2.0)
    assert (times.ratio, times.error) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-9))
