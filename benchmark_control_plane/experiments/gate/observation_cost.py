"""Measures what the access log and traces add to the CPU time of a request, and where the access log's goes.

One application with scripted engines, which take no time, serves completions in this process, without a
socket. Requests are served plain, with the access log, and traced, one after the other in turn, so that other
work on the machine slows all of them alike. Of each kind the median CPU time of the event loop's thread is
taken within a round, and the median of the differences over the rounds. The export of 150 traced requests to
another process is measured on its own. The throughput ratio at a share of traced requests is that of the
CPU times; work of an engine would bring it closer to 1. `access_line_us` are the parts of one line.

    python -m benchmark_control_plane.experiments.gate.observation_cost [--requests 150] [--rounds 9] \
        --results benchmark_control_plane/results/observation-cost.json
"""

import argparse
import asyncio
import gc
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace

import orjson
from starlette.types import ASGIApp, Message

from backends.testing.scripted import Script, ScriptedGenerator
from benchmark_control_plane.common.distributions import spread
from benchmark_control_plane.common.results_file import add_results, write_or_print
from controlplane.api.access_log import AccessLog, gate_fields, write_line
from controlplane.api.app import create_app
from controlplane.api.settings import ApiSettings, live_settings
from controlplane.config import parse
from controlplane.config.log_section import LogSection
from controlplane.log_output import LogFields, set_up_logging
from controlplane.service.bootstrap import build_service
from controlplane.service.ticket import Ticket

_MODEL = "scripted"
_BODY = orjson.dumps({"model": _MODEL, "prompt": "x" * 400, "max_tokens": 16})
_SHARES = (0.1, 1.0)
# At a share of 10 % so many come in the five seconds between two exports at 300 requests/s, a rate that is
# below what one thread serves with engines that take no time.
_EXPORTED = 150
_RECEIVER = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *arguments): pass
server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
_LINES = 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=9)
    add_results(parser)
    options = parser.parse_args()
    with _receiver() as url, tempfile.TemporaryFile("w+") as log, redirect_stderr(log):
        set_up_logging(LogSection())
        found = asyncio.run(_measure(url, options.requests, options.rounds))
    write_or_print(options.results, {"rounds": options.rounds, "requests": options.requests, **found})


@contextmanager
def _receiver() -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", _RECEIVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


async def _measure(url: str, requests: int, rounds: int) -> dict[str, object]:
    config = parse({"models": {"chat": {"model": _MODEL}}, "tracing": {"endpoint": url}})
    # Ends each stream after 16 tokens.
    generator = ScriptedGenerator(model=_MODEL, max_model_tokens=2_048, default=Script(tokens=16))
    service = build_service(config, [generator], [], workspace_bytes=0)
    await service.start()
    tickets: deque[Ticket] = deque(maxlen=4 * _EXPORTED)
    service.gate.dispatcher.accounting.on_end.append(tickets.append)
    tracer = service.status.traces.tracer
    assert tracer is not None
    variants = _variants(live_settings(service)())
    current, names = variants["plain"], list(variants)
    app = create_app(service, lambda: current)
    medians: dict[str, list[float]] = {name: [] for name in variants}
    exports: list[float] = []
    lines: list[float] = []
    write_seconds = 0.0
    flush = AccessLog.flush

    def timed_flush(log: AccessLog) -> None:
        nonlocal write_seconds
        began = time.thread_time()
        flush(log)
        write_seconds += time.thread_time() - began

    gc.disable()
    try:
        AccessLog.flush = timed_flush  # type: ignore[method-assign, assignment]
        for _ in range(rounds):
            took: dict[str, list[float]] = {name: [] for name in variants}
            for number in range(requests):
                # Each kind comes first, second and last equally often.
                for place in range(len(names)):
                    name = names[(number + place) % len(names)]
                    current = variants[name]
                    began = time.thread_time()
                    await _ask(app)
                    took[name].append(time.thread_time() - began)
            for name, times in took.items():
                medians[name].append(1e6 * statistics.median(times))
            # By then the timer has written the last lines.
            await asyncio.sleep(0.6)
            lines.append(1e6 * write_seconds / requests)
            write_seconds = 0.0
            traced = [(ticket, ()) for ticket in tickets if ticket.trace is not None][-_EXPORTED:]
            began = time.thread_time()
            tracer._export(traced)
            exports.append(1e6 * (time.thread_time() - began) / len(traced))
            gc.collect()
    finally:
        AccessLog.flush = flush  # type: ignore[method-assign]
        gc.enable()
        await service.stop()
    if tracer.dropped:
        raise RuntimeError(f"{tracer.dropped} requests were not exported; the log says why")
    return {**_report(medians, exports, lines), "access_line_us": _line_parts(tickets[-1])}


def _variants(settings: ApiSettings) -> dict[str, ApiSettings]:
    """The settings of each kind of request."""
    plain = replace(settings, has_access_log=False, trace_share=None)
    logged, traced = replace(plain, has_access_log=True), replace(plain, trace_share=1.0)
    return {"plain": plain, "access_log": logged, "traced": traced}


def _report(
    medians: Mapping[str, Sequence[float]], exports: Sequence[float], lines: Sequence[float]
) -> dict[str, object]:
    """The result; all arguments are microseconds of each round, the first by kind of request."""
    base, export = statistics.median(medians["plain"]), statistics.median(exports)
    added = {
        name: spread([a - b for a, b in zip(medians[name], medians["plain"], strict=True)], 1)
        for name in ("access_log", "traced")
    }
    # The lines of several requests are written at once, mostly between two requests.
    line = statistics.median(lines)
    per_line = max(0.0, added["access_log"]["median"]) + line
    per_trace = max(0.0, added["traced"]["median"]) + export
    return {
        "plain_request_us": round(base, 1),
        "added_us": added,
        "write_us_per_access_line": round(line, 1),
        "export_us_per_traced_request": round(export, 1),
        "throughput_ratio": {
            "access_log": round(base / (base + per_line), 4),
            **{f"traced {share:g}": round(base / (base + share * per_trace), 4) for share in _SHARES},
        },
    }


async def _ask(app: ASGIApp) -> None:
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
        "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    is_sent, status = False, 0

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            # The client stays until it has its answer.
            await asyncio.Event().wait()
        is_sent = True
        return {"type": "http.request", "body": _BODY, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    await app(scope, receive, send)
    if status != 200:
        raise RuntimeError(f"the request ended with status {status}")


def _line_parts(ticket: Ticket) -> dict[str, float]:
    """Median microseconds to collect the fields of one access line, to log them, and of parts of that."""
    log = logging.getLogger("tandem.access")
    head: dict[str, object] = {
        "request_id": "0123456789abcdef01234567", "client": "127.0.0.1", "method": "POST",
        "path": "/v1/completions", "status": 200, "bytes": 300, "duration_ms": 12.345,
    }  # fmt: skip
    message = LogFields("request", head | gate_fields([ticket]))
    return {
        "fields": _median_us(lambda: gate_fields([ticket])),
        "log": _median_us(lambda: write_line(message, time.time())),
        "log_text": _median_us(lambda: str(message)),
        "log_without_text": _median_us(lambda: log.info("request")),
    }


def _median_us(act: Callable[[], object]) -> float:
    durations = []
    for _ in range(_LINES):
        began = time.perf_counter()
        act()
        durations.append(time.perf_counter() - began)
    return round(1e6 * statistics.median(durations), 1)


if __name__ == "__main__":
    main()
