"""Forecasts are judged as they were made."""

import pytest

from predictors.calibration import Calibration


def test_coverage_and_error_by_class():
    calibration = Calibration()
    for number, tokens in enumerate((5, 20, 11, 10)):
        calibration.stated(f"r{number}", median=8.0, upper=10.0)
        calibration.happened(f"r{number}", "chat", tokens)
    calibration.stated("other", median=1.0, upper=1.0)
    calibration.happened("other", "batch", 3)
    assert calibration.coverage() == {"chat": 0.5, "batch": 0.0}
    assert calibration.mean_absolute_error() == {"chat": pytest.approx(5.0), "batch": 2.0}


def test_only_the_last_outcomes_count():
    calibration = Calibration(window=2)
    for number, tokens in enumerate((100, 1, 1)):
        calibration.stated(f"r{number}", median=1.0, upper=10.0)
        calibration.happened(f"r{number}", "chat", tokens)
    assert calibration.coverage() == {"chat": 1.0}
    assert calibration.mean_absolute_error() == {"chat": pytest.approx(0.0)}


def test_a_request_is_judged_by_its_first_forecast():
    calibration = Calibration()
    calibration.stated("r", median=5.0, upper=9.0)
    calibration.stated("r", median=50.0, upper=90.0)
    calibration.happened("r", "chat", 10)
    assert calibration.coverage() == {"chat": 0.0}


def test_forecasts_that_never_come_true_are_forgotten():
    calibration = Calibration(forget_after=2)
    for number in range(3):
        calibration.stated(f"r{number}", median=1.0, upper=1.0)
    calibration.happened("r0", "chat", 5)
    assert calibration.coverage() == {}
    calibration.happened("r1", "chat", 1)
    assert calibration.coverage() == {"chat": 1.0}
