"""The compressed size of a row by what its id is; sizes are the same on every machine."""

import pytest

from benchmark_control_plane.experiments.gate.decision_log_cost import ended_tickets, measured, with_ids

pytestmark = pytest.mark.long


def test_a_row_with_a_clients_uuid_is_smaller_than_one_with_an_id_of_the_server():
    tickets, config = ended_tickets(600)

    def size(*, of_clients):
        with_ids(tickets, of_clients=of_clients)
        return measured(tickets, config, 0.1)["compressed_mb_per_million"]

    assert size(of_clients=True) < 0.97 * size(of_clients=False)
