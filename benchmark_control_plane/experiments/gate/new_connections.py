"""Sends each request on a new connection, beyond what the engine can serve, and compares both views of it.

The server has a simulated engine of known capacity, 100 requests/s, in a process of its own. For each rate:
the time to the first byte of every response, the waits of `/health` on both ports meanwhile, and the share of
requests in time by the client's clock and by the server's metrics. The clock of a client starts before
it connects.

    python -m benchmark_control_plane.experiments.gate.new_connections [--rates 250 1000] [--seconds 10]
        [--results FILE]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from backends.cost_models.step_time import llm_only
from backends.simulated.generator import SimulatedGenerator
from backends.simulated.shared_device import SimulatedDevice
from benchmark_control_plane.common.results_file import add_results, write_json
from benchmark_control_plane.common.servers import (
    Server,
    cpu_seconds,
    free_port,
    interrupt_on_sigterm,
    serving,
)
from controlplane.config import parse
from controlplane.core.kv_geometry import KvGeometry

_MODEL = "simulated"
_OUTPUT_TOKENS = 2
_RUNNING = 16
# 16 requests of 2 steps in 0.16 s. The engine shares the event loop, unlike a real one; its steps are long so
# that a late loop delays them little.
_STEP_S = 0.08
_TTFT_S = 1.0
_ANSWER_S = 2.0
_MAX_WAIT_MS = 1_500
# A response or a probe without a first byte within this time counts as unanswered.
_PATIENCE_S = 15.0
_PROBE_PERIOD_S = 0.02
_PROBE_NICENESS = -10
_MEMBERS = {"model": _MODEL, "stream": True, "max_tokens": _OUTPUT_TOKENS,
            "messages": [{"role": "user", "content": "Where does this request wait?"}]}  # fmt: skip
_BODY = json.dumps(_MEMBERS).encode()
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """One rate. Shares are of all requests sent; times are in seconds or milliseconds, as named."""

    rate: float
    sent: int
    statuses: dict[str, int]
    unanswered: int
    answered_in_2_s: float
    slowest_first_byte_s: float
    health_port_ms: dict[str, float]
    main_port_ms: dict[str, float]
    client_in_time: float
    metrics_in_time: float
    shed: int
    server_cores: float


class Exchange(asyncio.Protocol):
    """One request on a new connection; times are None until they are known."""

    def __init__(self, start: float, ended: asyncio.Event) -> None:
        self.start = start
        self.first_byte: float | None = None
        self.first_token: float | None = None
        self.status = "none"
        self.is_whole = False
        self.transport: asyncio.BaseTransport | None = None
        self._ended = ended
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(_REQUEST)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._seen += data
        if self.first_byte is None:
            self.first_byte = now - self.start
            self.status = self._seen[9:12].decode()
        if self.first_token is None and b'"content":"' in self._seen:
            self.first_token = now - self.start
        self.is_whole = self.is_whole or b"data: [DONE]" in self._seen

    def connection_lost(self, exc: Exception | None) -> None:
        self._seen = b""
        self._ended.set()

    @property
    def is_in_time(self) -> bool:
        """Whether the whole answer came, and its first token in time."""
        return self.is_whole and self.first_token is not None and self.first_token <= _TTFT_S


async def _exchange(port: int, start: float) -> Exchange:
    ended = asyncio.Event()
    one = Exchange(start, ended)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await asyncio.get_running_loop().create_connection(lambda: one, "127.0.0.1", port)
            await ended.wait()
    except (OSError, TimeoutError):
        # It keeps the status "none", or counts as answered with what had come.
        if one.transport is not None:
            one.transport.close()
    return one


async def _load(port: int, rate: float, seconds: float) -> list[Exchange]:
    begin, running = time.perf_counter(), []
    for number in range(round(rate * seconds)):
        due = begin + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        running.append(asyncio.create_task(_exchange(port, time.perf_counter())))
    return list(await asyncio.gather(*running))


def _client(port: int, rate: float, seconds: float, results: "multiprocessing.Queue[Any]") -> None:
    """Runs in a process of its own, so that its probers do not share an interpreter with it."""
    found = uvloop.run(_load(port, rate, seconds))
    results.put([(one.status, one.first_byte, one.is_in_time) for one in found])


class HealthProber:
    """Asks for /health at a port on a new connection every 20 ms and records the waits in seconds.

    A probe that fails, or times out, counts as failed and with the time that it took.
    """

    def __init__(self, port: int) -> None:
        self.waits: list[float] = []
        self.failed = 0
        self._port = port
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        # Else it would measure how long it waits for a core itself.
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PROBE_NICENESS)
        while not self._end.wait(_PROBE_PERIOD_S):
            start, status = time.perf_counter(), b""
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=_PATIENCE_S) as probe:
                    probe.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                    status = probe.recv(4_096)[9:12]
            except OSError:
                # Counted below.
                pass
            self.failed += status != b"200"
            self.waits.append(time.perf_counter() - start)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Probes until the block ends."""
        self._thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._thread.join()

    def summary_ms(self) -> dict[str, float]:
        """P50, P99 and maximum, and the number of failed probes."""
        p50, p99, most = np.quantile(self.waits, [0.5, 0.99, 1.0]) * 1e3
        return {"p50": round(p50, 1), "p99": round(p99, 1), "max": round(most, 1), "failed": self.failed}


def _outcomes(server: Server) -> dict[str, float]:
    """Ended requests by outcome, and those that were shed."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=_PATIENCE_S) as page:
        text = page.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "tandem_requests_total":
                outcome = sample.labels["outcome"]
                found[outcome] = found.get(outcome, 0.0) + sample.value
            elif sample.name == "tandem_requests_shed_total":
                found["shed"] = sample.value
    return found


def measure(server: Server, health_port: int, rate: float, seconds: float) -> PhaseResult:
    """Opens `rate` new connections per second for `seconds`."""
    if server.process_id is None:
        raise RuntimeError(f"{server.name} is not running")
    before, cpu_before, begin = _outcomes(server), cpu_seconds(server.process_id), time.perf_counter()
    results: multiprocessing.Queue[Any] = multiprocessing.get_context("spawn").Queue()
    client = multiprocessing.get_context("spawn").Process(
        target=_client, args=(server.port, rate, seconds, results)
    )
    own, main = HealthProber(health_port), HealthProber(server.port)
    with own.running(), main.running():
        client.start()
        found = results.get()
        client.join()
    cores = (cpu_seconds(server.process_id) - cpu_before) / (time.perf_counter() - begin)
    counted = {name: value - before[name] for name, value in _outcomes(server).items()}
    waits = [wait for _, wait, _ in found if wait is not None]
    statuses: dict[str, int] = {}
    for status, _, _ in found:
        statuses[status] = statuses.get(status, 0) + 1
    sent = len(found)
    return PhaseResult(
        rate=rate,
        sent=sent,
        statuses=statuses,
        unanswered=sent - len(waits),
        answered_in_2_s=round(sum(wait <= _ANSWER_S for wait in waits) / sent, 4),
        slowest_first_byte_s=round(max(waits), 3),
        health_port_ms=own.summary_ms(),
        main_port_ms=main.summary_ms(),
        client_in_time=round(sum(is_in_time for _, _, is_in_time in found) / sent, 4),
        metrics_in_time=round(counted["met"] / sent, 4),
        shed=round(counted["shed"]),
        server_cores=round(cores, 2),
    )


def serve(port: int, health_port: int) -> int:
    """Serves the simulated engine until a signal; returns the exit status."""
    from controlplane.api.graceful_server import host_forever
    from controlplane.service.bootstrap import build_service

    config = parse(
        {
            "server": {"port": port, "health_port": health_port},
            "models": {"chat": {"model": _MODEL}},
            "classes": {"interactive": {"ttft_ms": _TTFT_S * 1_000, "default": True}},
            # What the engine has not started by then is evicted, so that each connection gets an answer.
            "admission": {"max_wait_ms": _MAX_WAIT_MS},
        }
    )
    device = SimulatedDevice(llm_only(lambda *_: _STEP_S))
    generator = SimulatedGenerator(
        device,
        geometry=KvGeometry(elements_per_token=512, bytes_per_element=2, block_tokens=16),
        lengths=lambda request: request.max_output_tokens,
        kv_bytes=None,
        model=_MODEL,
        max_running=_RUNNING,
        scheduling=config.engine_options(),
    )
    return host_forever(build_service(config, [generator], [], workspace_bytes=0), config)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="new_connections", description=__doc__)
    parser.add_argument("--rates", type=float, nargs="*", default=[250.0, 1_000.0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--serve", type=int, nargs=2, metavar=("PORT", "HEALTH_PORT"), help=argparse.SUPPRESS)
    add_results(parser)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        return serve(*options.serve)
    interrupt_on_sigterm()
    port, health_port = free_port(), free_port()
    module = "benchmark_control_plane.experiments.gate.new_connections"
    command = [sys.executable, "-m", module, "--serve", str(port), str(health_port)]
    with tempfile.TemporaryDirectory() as folder:
        described = Server("tandem", command, port, "/ready")
        with serving(described, Path(folder) / "tandem.log") as server:
            found = []
            for rate in options.rates:
                found.append(asdict(measure(server, health_port, rate, options.seconds)))
                print(json.dumps(found[-1]), flush=True)
    if options.results is not None:
        write_json(options.results, {"seconds": options.seconds, "capacity_rps": 100, "rates": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
