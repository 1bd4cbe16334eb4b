"""A disagreement between ledger and device is counted once, withheld at once and released slowly."""

from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from backends.device import probe as device_probe
from backends.device.probe import HostProbe
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.device import DeviceReading
from controlplane.metrics import Metrics
from controlplane.service.bootstrap import monitor_of
from controlplane.service.memory.memory_plan import MemoryPlan
from controlplane.service.memory.monitor import MemoryMonitor


@dataclass
class Readings:
    """A probe with readings set by the test."""

    own_bytes: int = 100
    free: int = 1_000
    is_closed: bool = False
    fails: bool = False
    counts_reserved_memory: bool = False

    def read(self) -> DeviceReading:
        if self.fails:
            raise OSError("nothing to be read")
        return DeviceReading(2_000, self.free, self.own_bytes, 2_000 - self.free - self.own_bytes)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Bench:
    probe: Readings = field(default_factory=Readings)
    withheld: list[int] = field(default_factory=list)

    def monitor(self, *, granted: int = 500, bound: int = 50) -> MemoryMonitor:
        return MemoryMonitor(self.probe, lambda: granted, self.withheld.append, bound)


def test_granted_memory_is_no_disagreement():
    bench = Bench()
    monitor = bench.monitor()
    for ours in (100, 600, 650, 300):
        bench.probe.own_bytes = ours
        monitor.sample()
    assert (monitor.most_ours, monitor.alerts, bench.withheld) == (650, 0, [])


def test_an_excess_is_withheld_at_once_and_released_slowly():
    bench = Bench()
    bench.probe.free = 300
    monitor = bench.monitor()
    monitor.sample()
    bench.probe.own_bytes = 900
    monitor.sample()
    assert (monitor.disagreement, monitor.withheld, monitor.alerts) == (300, 250, 1)
    bench.probe.own_bytes = 100
    monitor.sample()
    assert (monitor.disagreement, monitor.withheld, monitor.alerts) == (0, 234, 1)
    for _ in range(200):
        monitor.sample()
    assert monitor.withheld == bench.withheld[-1] == 0
    assert bench.withheld == sorted(bench.withheld, reverse=True)


@pytest.mark.parametrize(("free", "withheld"), [(5_000, 0), (550, 0), (500, 50), (300, 250), (20, 250)])
def test_an_excess_is_withheld_as_far_as_free_memory_does_not_cover_it(free: int, withheld: int):
    """500 bytes are granted and 50 are the bound; a hostile text has left 300 bytes with our processes."""
    bench = Bench()
    monitor = bench.monitor()
    monitor.sample()
    bench.probe.own_bytes, bench.probe.free = 900, free
    monitor.sample()
    assert (monitor.disagreement, monitor.withheld, monitor.alerts) == (300, withheld, 1)


def test_the_baseline_outlives_a_restarted_engine_and_a_replaced_worker():
    """The engine has 60 of 100 bytes at the start; the pool grants 500, a worker's weights come out of it."""
    bench = Bench()
    monitor = bench.monitor()
    monitor.sample()
    # Embeddings use the whole pool; the engine dies, and its successor is up while they still do.
    for ours in (600, 540, 600):
        bench.probe.own_bytes = ours
        monitor.sample()
        assert (monitor.disagreement, monitor.withheld) == (0, 0)
    # A worker of 80 bytes more, for which the quotas lost 80; then something keeps 300 beyond all grants.
    for ours, excess in ((520 + 80, 0), (900, 300)):
        bench.probe.own_bytes, bench.probe.free = ours, 5_000
        monitor.sample()
        assert (monitor.disagreement, monitor.withheld) == (excess, 0)
    # Another restart does not make the kept bytes part of what is allowed.
    for ours, excess in ((840, 240), (900, 300)):
        bench.probe.own_bytes = ours
        monitor.sample()
        assert monitor.disagreement == excess
    bench.probe.free = 300
    monitor.sample()
    assert monitor.withheld == 250


def test_free_memory_taken_by_others_is_withheld():
    bench = Bench()
    monitor = bench.monitor()
    bench.probe.free = 20
    monitor.sample()
    assert (monitor.withheld, monitor.least_free, monitor.alerts) == (30, 20, 0)


def test_it_samples_periodically_until_stopped():
    bench = Bench()

    async def main() -> int:
        import asyncio

        monitor = bench.monitor()
        monitor.start(0.01)
        bench.probe.own_bytes = 900
        await asyncio.sleep(0.1)
        monitor.stop()
        seen = monitor.alerts
        bench.probe.own_bytes = 5_000
        await asyncio.sleep(0.1)
        return seen, monitor.most_ours

    assert run(main()) == (1, 900)
    assert bench.probe.is_closed


def test_a_device_that_lists_none_of_our_processes_is_logged(caplog):
    """The driver of a container's GPU may list process ids of the host."""
    for ours in (0, 100):
        bench = Bench(Readings(own_bytes=ours))
        monitor = bench.monitor()
        monitor.sample()
        monitor.sample()
    assert len(caplog.records) == 1 and "lists none of our processes" in caplog.text


def test_failed_readings_are_logged_once_and_sampling_continues(caplog):
    bench = Bench()

    async def main() -> tuple[int, str]:
        import asyncio

        monitor, metrics = bench.monitor(), Metrics()
        monitor.start(0.01)
        bench.probe.fails = True
        await asyncio.sleep(0.1)
        assert (monitor.health.fault, monitor.to_json()["failures"]) == ("os_error", 10)
        bench.probe.fails = False
        bench.probe.own_bytes = 900
        await asyncio.sleep(0.02)
        monitor.stop()
        assert monitor.health.fault is None
        return monitor.alerts, metrics.exposition(monitor.readings(metrics)).decode()

    alerts, found = run(main())
    assert alerts == 1
    assert "tandem_device_alerts_total 1.0" in found and "tandem_device_read_failures_total 10.0" in found
    assert 'tandem_device_bytes{what="ours"} 900.0' in found and 'what="alerts"' not in found
    assert [record.getMessage() for record in caplog.records] == [
        "reading the device's memory failed: nothing to be read; retrying"
    ]


def test_a_failed_withhold_is_repeated():
    found = []

    def withhold(kept: int) -> None:
        if not found:
            found.append(None)
            raise OSError("not now")
        found.append(kept)

    monitor = MemoryMonitor(Readings(free=20), lambda: 500, withhold, 50)
    for _ in range(2):
        with suppress(OSError):
            monitor.sample()
    assert found == [None, 30]


def test_a_reading_of_the_real_host_shows():
    monitor = MemoryMonitor(HostProbe(), lambda: 2**30, lambda _: None, 2**20, lambda: 7)
    monitor.sample()
    shown = monitor.to_json()
    monitor.stop()
    assert shown["total"] >= shown["free"] > 0 < shown["ours"] == shown["most_ours"]
    assert shown["disagreement"] == shown["alerts"] == 0
    assert shown["allocator"] == 7


@pytest.mark.parametrize(
    ("counts_untouched", "is_static", "more"), [(True, True, 150), (True, False, 950), (False, True, 950)]
)
def test_a_cache_in_the_baseline_is_not_granted_again(monkeypatch, counts_untouched, is_static, more):
    """Memory counts on a GPU once allocated, on the host once written, with kvcached once mapped."""
    plan = MemoryPlan(
        memory_bytes=2_000, chat_weight_bytes=0, embedding_weight_bytes=0, activation_bytes=50,
        reserve_bytes=0, margin_bytes=100, pool_bytes=900, kv_bytes=800, workspace_bytes=100, geometry=None,
        max_model_tokens=0,
    )  # fmt: skip
    probe = Readings(counts_reserved_memory=counts_untouched)
    monkeypatch.setattr(device_probe, "open_probe", lambda: probe)
    monitor = monitor_of(plan, is_static=is_static)(lambda kept: None)
    monitor.sample()
    probe.own_bytes += more + 1
    monitor.sample()
    assert monitor.disagreement == 1
