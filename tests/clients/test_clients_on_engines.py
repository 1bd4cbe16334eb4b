"""The clients that this Python has, unmodified, against configs/dev.yaml on real engines."""

import sys

import pytest

from tests.clients.client_table import CLIENTS, FAILS, probed_server, row_of

pytestmark = [pytest.mark.engine, pytest.mark.untimed, pytest.mark.slow]


def test_every_feature_of_the_installed_clients_works():
    with probed_server() as url:
        rows = [row for client in CLIENTS if (row := row_of(client, url, [sys.executable], None)) is not None]
    failures = {f"{row.client.name}, {name}": text for row in rows for name, text in row.failures.items()}
    assert not failures
    assert all(FAILS not in row.cells.values() for row in rows)
    assert {row.client for row in rows} >= {client for client in CLIENTS if client.ci_tests}
