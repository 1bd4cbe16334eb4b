"""Tenants on a fleet that is too small, with and without an exchange of their counters."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark_control_plane.fleet_studies.client_sections import FairnessStudy
from benchmark_control_plane.fleet_studies.global_fairness import (
    CounterExchange,
    FleetQueues,
    global_fairness,
)
from benchmark_control_plane.fleet_studies.study_reader import read_study
from benchmark_control_plane.simulator.cluster.scenario import RoutingPolicy
from controlplane.config import ConfigError
from controlplane.core.clock import NO_TIME, Duration, Instant, seconds
from controlplane.core.memory_ledger import Footprint
from controlplane.core.request import Timeline
from controlplane.service.gate.fair_queueing import TenantQueues
from controlplane.service.ticket import Ticket
from tests.benchmark_control_plane.fleet_studies.test_study_file import RESULTS, ROOT
from tests.example_requests import a_request

pytestmark = pytest.mark.long
FILE = ROOT / "configs/bench/fleet-fairness.yaml"


def fairness_study() -> FairnessStudy:
    study = read_study(FILE)
    assert isinstance(study, FairnessStudy)
    return study


def leading_exchange() -> CounterExchange:
    """One after two seconds with 500 tokens/s, in which a tenant leads by 200 tokens."""
    exchange = CounterExchange(1.0)
    assert exchange.lead_seconds("wide") == 0.0
    exchange._served = sum(exchange._counters.heard("0", "a", {"wide": 600, "narrow": 400}).values())
    exchange._elapsed = 2.0
    exchange._counters.set_active(["wide", "narrow"])
    return exchange


def test_a_lead_is_the_time_in_which_the_fleet_serves_it() -> None:
    exchange = leading_exchange()
    assert exchange.lead_seconds("wide") == pytest.approx(0.4)
    assert exchange.lead_seconds("narrow") == 0.0


@pytest.mark.parametrize(("longest", "delay"), [(seconds(9), 0.4), (seconds(0.1), 0.1)])
def test_the_queues_of_a_box_add_the_lead_to_their_own_delay(longest: Duration, delay: float) -> None:
    queues = FleetQueues(TenantQueues({"wide": 1.0, "narrow": 1.0}), leading_exchange())

    async def delays() -> list[Duration]:
        found = []
        for tenant in ("wide", "narrow"):
            request = replace(a_request("r", 20, 100), tenant=tenant)
            ticket = Ticket(request, Footprint(1), None, Timeline(Instant(0)))
            queues.assign_delay(ticket, NO_TIME, longest, Instant(0))
            found.append(ticket.tenant_delay)
        return found

    assert asyncio.run(delays()) == [seconds(delay), NO_TIME]


def test_counters_that_are_exchanged_give_more_to_a_tenant_on_one_box() -> None:
    study = replace(
        fairness_study(), seconds=6.0, warm_up=1.0, policies=(RoutingPolicy.PREFIX_STICKY,),
        exchange_s=(None, 0.2), seeds=(1,),
    )  # fmt: skip
    alone, exchanged = global_fairness(study)["rows"]
    assert 0.0 < alone["narrow_percent"] < exchanged["narrow_percent"] < 50.0


def test_a_warm_up_of_the_whole_time_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(FILE.read_text(encoding="utf-8").replace("warm_up: 6", "warm_up: 18"), encoding="utf-8")
    with pytest.raises(ConfigError, match="warm_up=18: should be below seconds=18"):
        read_study(file)


def test_the_committed_rows_are_those_of_the_fairness_study() -> None:
    study = fairness_study()
    found = json.loads((RESULTS / "fleet-fairness.json").read_text(encoding="utf-8"))
    assert [(row["policy"], row["exchange_s"]) for row in found["rows"]] == [
        (policy.name, period) for policy in study.policies for period in study.exchange_s
    ]
    assert (found["seconds"], found["seeds"]) == (study.seconds, list(study.seeds))
