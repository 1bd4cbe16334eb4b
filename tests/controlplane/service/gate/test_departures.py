"""Preemptions that nobody awaits: a failed one is logged."""

import asyncio

from controlplane.core.errors import BackendDown, BackendFailed
from controlplane.service.gate.departures import Departures


async def failing(error: Exception) -> None:
    raise error


async def test_a_failed_preemption_is_logged_unless_its_engine_is_dead(caplog):
    departures = Departures()
    tasks = [departures.add(failing(error)) for error in (BackendFailed("lost"), BackendDown("dead"))]
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == [
        "a request whose lease is closed may go on in its engine: BackendFailed('lost')"
    ]
