"""Measures the cost of the live feed: CPU time at rest, time under load, TTFT beside readers, full memory.

Three servers with a simulated engine run side by side without requests: one without samples, one that samples
once a second, and one whose feed is read twice a second too, as by an open dashboard. The CPU time of each
process is read at the end of each window; the difference is taken within a window, and the median over the
windows. At rest there is nothing to order or reject, so all that differs is the feed.

Then the time of a sample and of an answer of 64 KiB is taken with 1,000 live requests, and the TTFT of a
server under load without and with three readers, in windows that alternate.

    python -m benchmark_control_plane.experiments.gate.live_feed_cost [--windows 5] [--seconds 10] \
        --results benchmark_control_plane/results/live-feed.json
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
import tracemalloc
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from backends.simulated.generator import SimulatedGenerator
from backends.simulated.shared_device import SimulatedDevice
from benchmark_control_plane.common.distributions import spread
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.common.servers import Server, all_serving, cpu_seconds, free_port
from benchmark_control_plane.experiments.gate.live_feed_load import (
    READING_S,
    ttft_by_readers,
    with_live_requests,
)
from benchmark_control_plane.simulator.simulated_machine import GEOMETRY
from controlplane.config import parse
from controlplane.service.live_records import RING_SIZES, LiveRecords
from controlplane.service.runtime.timers import MonotonicClock

_KEY = "feed"
_MODEL = "simulated"
_WITHOUT, _SAMPLED, _READ = "without", "sampled", "read"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--without-feed", action="store_true", help=argparse.SUPPRESS)
    add_results(parser)
    options = parser.parse_args()
    if options.serve is not None:
        return _serve(options.serve, has_feed=not options.without_feed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        names = (_WITHOUT, _SAMPLED, _READ)
        servers = stack.enter_context(all_serving([(_server(name), folder / name) for name in names]))
        found = _measure(dict(zip(names, servers, strict=True)), options.windows, options.seconds)
        url = servers[names.index(_SAMPLED)].url
        under_load = asyncio.run(ttft_by_readers(url, _MODEL, _KEY, options.windows, options.seconds))
    report = {
        "at_rest": found,
        "full_rings_mb": round(full_rings_bytes() / 1e6, 2),
        "with_live_requests": with_live_requests(),
        "ttft_by_readers": under_load,
    }
    write_or_print(options.results, report)
    return 0


def _server(name: str) -> Server:
    port = free_port()
    command = [sys.executable, "-m", __spec__.name, "--serve", str(port)]
    return Server(name, [*command, *(["--without-feed"] if name == _WITHOUT else [])], port, "/ready")


def _measure(servers: Mapping[str, Server], windows: int, seconds: int) -> dict[str, object]:
    read = _reader(servers[_READ].url)
    busy: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(-1, windows):
        before = {name: _busy_seconds(server) for name, server in servers.items()}
        began = time.monotonic()
        for number_read in range(1, round(seconds / READING_S) + 1):
            read()
            time.sleep(max(0.0, began + number_read * READING_S - time.monotonic()))
        elapsed = time.monotonic() - began
        if number >= 0:
            for name, server in servers.items():
                busy[name].append(100 * (_busy_seconds(server) - before[name]) / elapsed)
    base = busy[_WITHOUT]
    return {
        "percent_of_a_core": {name: round(statistics.median(values), 3) for name, values in busy.items()},
        "added": {
            name: spread([a - b for a, b in zip(busy[name], base, strict=True)], 3)
            for name in (_SAMPLED, _READ)
        },
    }


def _busy_seconds(server: Server) -> float:
    assert server.process_id is not None
    return cpu_seconds(server.process_id)


def full_rings_bytes() -> int:
    """Memory of full rings, with samples of six classes and events of the usual length."""
    names = "abcdef"
    sizes = ("quota", "owned", "lent", "held", "deficit", "shared_prefix")
    owner = {f"{name}_bytes": 10**9 for name in sizes} | {"waiting": 3, "running": 3, "urgency": 0.1}
    window = {"met": 1, "ended": 1, "burn": 0.1}
    of_class = {"waiting": 1, "running": 1, "5m": window, "1h": window, "ttft_ms": 100.1}
    sample = {
        "owners": {
            name: owner | {"held_by_class": dict.fromkeys(names, 10**8)} for name in ("llm", "embedding")
        },
        "classes": dict.fromkeys(names, of_class | {"first_tokens": 1, "predicted_ttft_ms": 100.1}),
    }
    times = {f"{name}_ms": 1234.5 for name in ("predicted_ttft", "ttft", "tpot", "e2e", "gap")}
    event = {"id": "chatcmpl-0123456789abcdef-17", "class": "interactive", "kind": "generate", **times}
    tracemalloc.start()
    records = LiveRecords(MonotonicClock())
    for kind, size in RING_SIZES.items():
        for _ in range(size):
            records.add(kind, records.clock.now(), sample if kind == "sample" else event)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


def _reader(url: str) -> Callable[[], None]:
    """Reads what is new on the feed, as the dashboard does."""
    number = 0

    def read() -> None:
        nonlocal number
        request = urllib.request.Request(
            f"{url}/admin/live?since={number}", headers={"authorization": f"Bearer {_KEY}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            number = json.load(answer)["next"]

    return read


def _serve(port: int, *, has_feed: bool) -> int:
    from backends.cost_models.step_time import llm_only
    from controlplane.api.graceful_server import host_forever
    from controlplane.service.bootstrap import build_service

    # No request is refused, however long the processes wait for a core.
    classes = {name: {"ttft_ms": 1_000, "sheddable": False, "default": name == "a"} for name in "abcdef"}
    limits = {"max_queue_delay_ms": 60_000}
    server = {"port": port, "admin_key_sha256": sha256(_KEY.encode()).hexdigest(), "limits": limits}
    config = parse({"server": server, "models": {"chat": {"model": _MODEL}}, "classes": classes})
    generator = SimulatedGenerator(
        SimulatedDevice(llm_only(lambda *_: 0.02)),
        geometry=GEOMETRY,
        lengths=lambda request: request.max_output_tokens,
        kv_bytes=None,
        model=_MODEL,
        scheduling=config.engine_options(),
    )
    service = build_service(config, [generator], [], workspace_bytes=0)
    start = service.start

    async def start_without_feed() -> None:
        await start()
        service.live.stop()

    if not has_feed:
        service.start = start_without_feed  # type: ignore[method-assign]
    return host_forever(service, config)


if __name__ == "__main__":
    raise SystemExit(main())
