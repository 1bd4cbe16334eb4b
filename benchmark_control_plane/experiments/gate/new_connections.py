"""Sends each request on a new connection, beyond what the engine can serve, and compares both views of it.

The server has a simulated engine of known capacity, 100 requests/s, in a process of its own. For each rate:
the time to the first byte of every response, the waits of `/health` on both ports meanwhile, and the share of
requests in time by the client's clock and by the server's metrics. The clock of a client starts when its
request is due, before it connects. Clients at the rates of `--kept-alive`, which come first, use a connection
again once its response has ended.

    python -m benchmark_control_plane.experiments.gate.new_connections
        [--kept-alive 300] [--rates 250 1000] [--seconds 10] [--results FILE]
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
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import httptools
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
from benchmark_control_plane.simulator.simulated_machine import GEOMETRY
from controlplane.config import parse

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
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: %s\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
)


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """One rate. Shares are of all requests sent; times are in seconds or milliseconds, as named."""

    rate: float
    keeps_alive: bool
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


@dataclass(slots=True)
class Exchange:
    """One request and its response; times in seconds after it was due are None until they are known."""

    start: float
    first_byte: float | None = None
    first_token: float | None = None
    status: str = "none"
    is_whole: bool = False

    @property
    def is_in_time(self) -> bool:
        """Whether the whole answer came, and its first token in time."""
        return self.is_whole and self.first_token is not None and self.first_token <= _TTFT_S


class Connection(asyncio.Protocol):
    """A connection with one exchange at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport, self.is_open = cast(asyncio.WriteTransport, transport), True

    def send(self, exchange: Exchange, *, keeps_alive: bool) -> asyncio.Future[None]:
        """Sends the request; the future is done when its response has ended, or the connection."""
        assert self._transport is not None
        self._exchange, self._seen = exchange, b""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        kind = b"keep-alive" if keeps_alive else b"close"
        self._transport.write(_REQUEST % (kind, len(_BODY), _BODY))
        return self._ended

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._exchange.first_byte is None:
            self._exchange.first_byte = time.perf_counter() - self._exchange.start
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._seen += body
        if self._exchange.first_token is None and b'"content":"' in self._seen:
            self._exchange.first_token = time.perf_counter() - self._exchange.start

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._exchange.status = str(self._parser.get_status_code())
        self._exchange.is_whole = b"data: [DONE]" in self._seen
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


class Client:
    """Sends requests to a port, each on a new connection or, if it `keeps_alive`, on an idle one."""

    def __init__(self, port: int, *, keeps_alive: bool) -> None:
        self._port, self._keeps_alive = port, keeps_alive
        self._idle: list[Connection] = []

    async def load(self, rate: float, seconds: float) -> list[Exchange]:
        """Sends `rate` requests per second for `seconds`, and closes the connections."""
        begin, running = time.perf_counter(), []
        for number in range(round(rate * seconds)):
            due = begin + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            running.append(asyncio.create_task(self._exchange(Exchange(due))))
        found = list(await asyncio.gather(*running))
        for connection in self._idle:
            connection.close()
        return found

    async def _exchange(self, exchange: Exchange) -> Exchange:
        connection: Connection | None = None
        try:
            async with asyncio.timeout(_PATIENCE_S):
                connection = await self._connected()
                await connection.send(exchange, keeps_alive=self._keeps_alive)
        except (OSError, TimeoutError):
            # It keeps the status "none", or counts as answered with what had come.
            if connection is not None:
                connection.close()
            return exchange
        if self._keeps_alive and connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()
        return exchange

    async def _connected(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        return connection


def _load(client: Client, rate: float, seconds: float) -> list[tuple[str, float | None, bool]]:
    """Runs in a process of its own, so that the probers do not share an interpreter with the client."""
    found = uvloop.run(client.load(rate, seconds))
    return [(one.status, one.first_byte, one.is_in_time) for one in found]


class HealthProber:
    """Asks for /health at a port on a new connection every 20 ms and records the waits in seconds.

    A wait begins when the probe is due, so that a long one counts for all probes that it holds up. A probe
    that fails, or times out, counts as failed and with the time that it took.
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
        due = time.perf_counter() + _PROBE_PERIOD_S
        while not self._end.wait(max(0.0, due - time.perf_counter())):
            status = b""
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=_PATIENCE_S) as probe:
                    probe.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                    status = probe.recv(4_096)[9:12]
            except OSError:
                # Counted below.
                pass
            self.failed += status != b"200"
            self.waits.append(time.perf_counter() - due)
            due += _PROBE_PERIOD_S

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


def measure(
    server: Server, health_port: int, rate: float, seconds: float, *, keeps_alive: bool
) -> PhaseResult:
    """Sends `rate` requests per second for `seconds`, on new connections unless the client `keeps_alive`."""
    if server.process_id is None:
        raise RuntimeError(f"{server.name} is not running")
    before, cpu_before, begin = _outcomes(server), cpu_seconds(server.process_id), time.perf_counter()
    own, main = HealthProber(health_port), HealthProber(server.port)
    client = Client(server.port, keeps_alive=keeps_alive)
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawning) as pool, own.running(), main.running():
        found = pool.submit(_load, client, rate, seconds).result()
    cores = (cpu_seconds(server.process_id) - cpu_before) / (time.perf_counter() - begin)
    counted = {name: value - before[name] for name, value in _outcomes(server).items()}
    waits = [wait for _, wait, _ in found if wait is not None]
    statuses: dict[str, int] = {}
    for status, _, _ in found:
        statuses[status] = statuses.get(status, 0) + 1
    sent = len(found)
    return PhaseResult(
        rate=rate,
        keeps_alive=keeps_alive,
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
        geometry=GEOMETRY,
        lengths=lambda request: request.max_output_tokens,
        kv_bytes=None,
        model=_MODEL,
        max_running=_RUNNING,
        scheduling=config.engine_options(),
    )
    return host_forever(build_service(config, [generator], [], workspace_bytes=0), config)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="new_connections", description=__doc__)
    parser.add_argument("--kept-alive", type=float, nargs="*", default=[], metavar="RATE")
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
            phases = [(rate, True) for rate in options.kept_alive] + [(rate, False) for rate in options.rates]
            for rate, keeps_alive in phases:
                phase = measure(server, health_port, rate, options.seconds, keeps_alive=keeps_alive)
                found.append(asdict(phase))
                print(json.dumps(found[-1]), flush=True)
    if options.results is not None:
        write_json(options.results, {"seconds": options.seconds, "capacity_rps": 100, "rates": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
