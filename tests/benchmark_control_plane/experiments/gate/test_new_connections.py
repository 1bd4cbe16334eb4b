"""The clock of a client starts when its request is due, and that of a probe when the probe is."""

from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest

from benchmark_control_plane.common.servers import free_port
from benchmark_control_plane.experiments.gate import new_connections
from benchmark_control_plane.experiments.gate.new_connections import Client


async def test_requests_are_timed_from_their_planned_moments():
    found = await Client(free_port(), keeps_alive=False).load(rate=1_000.0, seconds=0.02)
    assert [exchange.status for exchange in found] == ["none"] * 20
    gaps = [after.start - at.start for at, after in pairwise(found)]
    assert gaps == pytest.approx([0.001] * 19, abs=1e-8)


def test_a_probe_that_hangs_counts_for_those_that_it_holds_up(monkeypatch):
    """One wait of a second among 60 of no time would leave the 0.99 quantile at nothing."""
    clock = SimpleNamespace(now=100.0)

    def connected(*_, **__):
        clock.now += 1.0 if not prober.waits else 0.0
        return nullcontext(SimpleNamespace(sendall=lambda sent: None, recv=lambda size: b"HTTP/1.1 200 OK"))

    def ended(seconds):
        clock.now += seconds
        return len(prober.waits) == 61

    prober = new_connections.HealthProber(0)
    prober._end = SimpleNamespace(wait=ended)
    monkeypatch.setattr(new_connections, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(new_connections, "socket", SimpleNamespace(create_connection=connected))
    prober._run()
    assert prober.waits[:51] == pytest.approx([1.0 - 0.02 * number for number in range(51)], abs=1e-6)
    assert prober.waits[51:] == pytest.approx([0.0] * 10, abs=1e-6)
    assert prober.failed == 0
