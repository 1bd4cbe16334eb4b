"""The rate that a fleet carries is found in few runs, and states what routing loses."""

import pytest

from benchmark_control_plane.fleet_studies.fleet_capacity import fleet_capacity, rate_kept
from benchmark_control_plane.fleet_studies.study_file import CapacityStudy
from benchmark_control_plane.simulator.cluster.scenario import RoutingPolicy


def falling(rate: float) -> float:
    """All requests are kept up to 30 per second, and 0.9 of them at 40."""
    return min(1.0, 1.3 - rate / 100)


@pytest.mark.parametrize(("guess", "runs"), [(39.0, 2), (41.0, 2), (40.0, 2), (30.0, 7), (60.0, 10)])
def test_a_near_guess_takes_two_runs(guess: float, runs: int) -> None:
    tried = []

    def met(rate: float) -> float:
        tried.append(rate)
        return falling(rate)

    assert rate_kept(met, 0.9, guess) == pytest.approx(40.0)
    assert len(tried) == runs


def test_where_no_rate_is_kept_the_search_ends() -> None:
    assert rate_kept(lambda rate: 0.5, 0.9, 30.0) == 0.0


@pytest.mark.long
def test_rows_state_rate_loss_and_reports() -> None:
    policies = (RoutingPolicy.TANDEM, RoutingPolicy.RANDOM)
    study = CapacityStudy(
        "mine", "How?", boxes=(1, 8), policies=policies, seconds=40.0, warm_up=20.0, requests=10_000
    )
    found = fleet_capacity(study)
    one, _, eight, at_random = found["rows"]
    assert one["lost_to_routing_points"] == 0
    assert at_random["lost_to_routing_points"] > eight["lost_to_routing_points"]
    assert at_random["rate_per_box"] < eight["rate_per_box"]
    assert (one["report_bytes_per_second"], eight["report_bytes_per_second"]) == (6_800, 54_400)
    assert fleet_capacity(study)["rows"][2]["rate_per_box"] == eight["rate_per_box"]
