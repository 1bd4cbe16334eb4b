"""The clock of a client starts when its request is due."""

from itertools import pairwise

import pytest

from benchmark_control_plane.common.servers import free_port
from benchmark_control_plane.experiments.gate.new_connections import Client


async def test_requests_are_timed_from_their_planned_moments():
    found = await Client(free_port(), keeps_alive=False).load(rate=1_000.0, seconds=0.02)
    assert [exchange.status for exchange in found] == ["none"] * 20
    gaps = [after.start - at.start for at, after in pairwise(found)]
    assert gaps == pytest.approx([0.001] * 19, abs=1e-8)
