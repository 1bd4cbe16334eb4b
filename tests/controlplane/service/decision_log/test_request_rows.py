"""Rows of requests: their size by what the id is, the same on every machine, and the order within."""

from dataclasses import replace

import pytest

from benchmark_control_plane.experiments.gate.decision_log_cost import (
    logged_run,
    measured,
    sample_row_bytes,
    with_ids,
)
from controlplane.core.clock import Instant, milliseconds
from controlplane.service.decision_history import Preempted
from controlplane.service.decision_log.log_rows import request_row

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run():
    return logged_run(2_000)


@pytest.mark.parametrize("of_clients", [False, True])
def test_a_million_requests_take_less_than_50_mb_at_20_a_second(run, of_clients):
    tickets, config, samples = run
    with_ids(tickets, of_clients=of_clients)

    def size(count):
        share = config.decision_log.sample
        return count * measured(tickets[:count], config, share)["compressed_mb_per_million"]

    # Not the first rows, which take more without others to refer to, nor those of the run's end.
    assert (size(1_500) - size(500)) / 1_000 + sample_row_bytes(tickets, config, samples) / 20 < 50


def test_a_row_takes_as_much_with_a_clients_uuid_as_with_an_id_of_the_server(run, monkeypatch):
    tickets, config, _ = run

    def size(*, of_clients):
        with_ids(tickets, of_clients=of_clients)
        return measured(tickets, config, 0.1)["compressed_mb_per_million"]

    found = size(of_clients=True)
    assert found < 1.06 * size(of_clients=False)
    monkeypatch.setattr("controlplane.service.decision_log.log_rows.logged_id", str)
    assert found < 0.9 * size(of_clients=True)


def test_decisions_are_in_order_of_time_also_where_a_preemption_was_found_late():
    ticket = next(each for each in logged_run(20)[0] if len(each.history) == 1)
    (admitted,) = ticket.history
    # The engine's preemption is known, and in the history, only after what followed it.
    later = replace(admitted, at=Instant(admitted.at + milliseconds(20)))
    ticket.history += [later, Preempted(Instant(admitted.at + milliseconds(10)), "engine")]
    row = request_row(ticket, 0, tenant="t", blocks=(), retry_of=None, has_numbers=False)
    assert [each["decision"] for each in row["decisions"]] == ["ADMIT", "PREEMPTED", "ADMIT"]
