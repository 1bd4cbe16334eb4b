"""Clients that come back after a rejection, and what is counted of their storm."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmark_control_plane.fleet_studies.client_sections import BurstSection, RejectedClient, StormStudy
from benchmark_control_plane.fleet_studies.joined_workloads import joined
from benchmark_control_plane.fleet_studies.retry_storms import retry_storms, storm_figures
from benchmark_control_plane.fleet_studies.study_reader import read_study
from benchmark_control_plane.simulator.cluster.oracle import (
    ClientTry,
    ExactResult,
    FleetClients,
    simulate_exactly,
)
from benchmark_control_plane.simulator.cluster.scenario import FleetOutcome, FleetScenario, FleetWorkload
from controlplane.config import ConfigError
from tests.benchmark_control_plane.fleet_studies.test_study_file import RESULTS, ROOT

pytestmark = pytest.mark.long
FILE = ROOT / "configs/bench/fleet-retry-storms.yaml"
MET, REJECTED = FleetOutcome.MET, FleetOutcome.REJECTED


def storm_study() -> StormStudy:
    study = read_study(FILE)
    assert isinstance(study, StormStudy)
    return study


def test_joined_requests_are_in_the_order_of_arrival() -> None:
    one, other = FleetWorkload.drawn(5, 2, 1), FleetWorkload.drawn(5, 2, 2, groups=3, shared_tokens=9)
    both, part = joined(one, other)
    assert np.all(np.diff(both.at) >= 0)
    assert np.array_equal(both.prompt_tokens[part == 0], one.prompt_tokens)
    assert np.array_equal(both.group[part == 1], other.group)


def test_seconds_after_the_burst_are_counted_by_their_tries() -> None:
    study = replace(storm_study(), burst=BurstSection(10.0, 3.0, 1.0), rate_per_box=1.0, seconds=16.0)
    # The burst ends at 13 s. A request of it comes back twice, one that arrives later is rejected once.
    at = np.array([1.0, 11.0, 13.5, 15.5])
    tries = [
        ClientTry(1.0, 0, MET),
        ClientTry(11.0, 1, REJECTED),
        ClientTry(13.2, 1, REJECTED),
        ClientTry(14.2, 1, MET),
        ClientTry(13.5, 2, REJECTED),
        ClientTry(14.5, 2, MET),
        ClientTry(15.5, 3, MET),
    ]
    tokens, nothing = np.ones(4, np.int32), np.full(4, np.nan, np.float32)
    workload = FleetWorkload(at, tokens, tokens, tokens, tokens, tokens)
    outcome = np.full(4, int(MET), np.int8)
    found = ExactResult(outcome, nothing, nothing, tokens, tokens, 0, 0, 0.0, tries)
    figures = storm_figures(study, found, workload, np.array([False, True, False, False]))
    assert figures == {
        "burst_met_percent": 100.0,
        "later_met_percent": 50.0,
        "tries_per_request": 7 / 4,
        "most_tries_per_s": 2 / study.fleet.boxes,
        "calm_after_s": 1.0,
        "second_tries_percent": 0.0,
    }


def test_a_client_comes_back_when_it_was_told_to() -> None:
    waits = []

    def wait(stated: float) -> float:
        waits.append(stated)
        return stated

    load = FleetWorkload.drawn(80, 3, 1)
    found = simulate_exactly(
        FleetScenario(1, ttft=0.2, routers=1), load, clients=FleetClients(tries=3, wait=wait)
    )
    assert len(found.tries) == len(load) + len(waits)
    assert min(waits) >= 1.0
    by_number = [sorted(one for one in found.tries if one.number == number) for number in range(len(load))]
    assert max(map(len, by_number)) > 1
    for tries in by_number:
        assert all(one.outcome is REJECTED for one in tries[:-1])
        assert len(tries) == 3 or tries[-1].outcome is not REJECTED
        assert FleetOutcome(found.outcome[tries[0].number]) is tries[-1].outcome


def test_a_reduced_study_has_a_row_for_a_client() -> None:
    study = storm_study().quick()
    [row] = retry_storms(study)["rows"]
    assert (row["clients"], row["retries"]) == (str(RejectedClient.ONE_SECOND), True)
    assert row["tries_per_request"] > 1.0
    assert 0.0 <= row["later_met_percent"] <= 100.0


def test_a_burst_that_does_not_end_in_time_is_refused(tmp_path: Path) -> None:
    text = FILE.read_text(encoding="utf-8").replace("seconds: 32", "seconds: 11")
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="seconds=11: should be a second above the end of burst, 11"):
        read_study(file)


def test_the_committed_rows_are_those_of_the_study() -> None:
    study = storm_study()
    found = json.loads((RESULTS / "fleet-retry-storms.json").read_text(encoding="utf-8"))
    assert [(row["retries"], row["clients"]) for row in found["rows"]] == [
        (retries, str(client)) for retries in study.retries for client in study.clients
    ]
    assert (found["seconds"], found["tries"], found["seeds"]) == (
        study.seconds,
        study.tries,
        list(study.seeds),
    )
