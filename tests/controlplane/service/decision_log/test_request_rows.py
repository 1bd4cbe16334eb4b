"""Rows of requests: their size by what the id is, the same on every machine, and the order within."""

from dataclasses import replace

import pytest

from benchmark_control_plane.experiments.gate.decision_log_cost import ended_tickets, measured, with_ids
from controlplane.core.clock import Instant, milliseconds
from controlplane.service.decision_history import Preempted
from controlplane.service.decision_log.log_rows import request_row

pytestmark = pytest.mark.long


def test_a_row_takes_as_much_with_a_clients_uuid_as_with_an_id_of_the_server(monkeypatch):
    tickets, config = ended_tickets(600)

    def size(*, of_clients):
        with_ids(tickets, of_clients=of_clients)
        return measured(tickets, config, 0.1)["compressed_mb_per_million"]

    found = size(of_clients=True)
    assert found < 1.06 * size(of_clients=False)
    monkeypatch.setattr("controlplane.service.decision_log.log_rows.logged_id", str)
    assert found < 0.9 * size(of_clients=True)


def test_decisions_are_in_order_of_time_also_where_a_preemption_was_found_late():
    ticket = next(each for each in ended_tickets(20)[0] if len(each.history) == 1)
    (admitted,) = ticket.history
    # The engine's preemption is known, and in the history, only after what followed it.
    later = replace(admitted, at=Instant(admitted.at + milliseconds(20)))
    ticket.history += [later, Preempted(Instant(admitted.at + milliseconds(10)), "engine")]
    row = request_row(ticket, 0, tenant="t", blocks=(), retry_of=None, has_numbers=False)
    assert [each["decision"] for each in row["decisions"]] == ["ADMIT", "PREEMPTED", "ADMIT"]
