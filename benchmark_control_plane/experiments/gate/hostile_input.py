"""Sends bodies that are meant to exhaust the server, and measures what they cost it and other clients.

For each body: its status, seconds from its last byte to the reply, the longest waits of `/health` on its own
port and on that of the API and of another tenant's embedding meanwhile, the size of the reply, and how much
the server's memory grew at most and after.

    python -m benchmark_control_plane.experiments.gate.hostile_input [--body NAME ...] [--senders 1]
        [--results FILE]
"""

import argparse
import hashlib
import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.results_file import add_results, write_json
from benchmark_control_plane.common.servers import (
    Server,
    free_port,
    interrupt_on_sigterm,
    serving,
    tandem_server,
)

_KEYS = {"attacker": "attacker-key", "other": "other-key"}
_TENANTS: dict[str, Any] = {
    name: {"api_keys_sha256": [hashlib.sha256(key.encode()).hexdigest()]} for name, key in _KEYS.items()
}
_TENANTS["attacker"]["tokens_per_minute"] = 2_000
CONFIG: dict[str, Any] = {
    "models": {
        "chat": {
            "model": "tandem/tiny-llama",
            "name": "tiny-llama",
            "engine": {"max_model_len": 2048, "max_num_seqs": 16, "enforce_eager": True, "block_size": 32,
                       "kv_cache_memory_bytes": 64 * 2**20},
        },
        "embeddings": [{"model": "tandem/minilm", "name": "minilm", "batch_tokens": 4096, "threads": 1,
                        # At idle priority the other tenant would wait for any process of the machine.
                        "idle_cpu_priority": False}],
    },
    "pool": {"memory": "2GiB"},
    "quota": {"llm": {"nominal": 0.7}, "embedding": {"nominal": 0.3}},
    "tenants": _TENANTS,
}  # fmt: skip
CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_REST_SECONDS = 0.5


def _chat(content: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "tiny-llama", "messages": messages, **fields}).encode()


def _embed(given: object) -> bytes:
    return json.dumps({"model": "minilm", "input": given}, separators=(",", ":")).encode()


def _schema(schema: dict[str, object]) -> tuple[str, bytes]:
    named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return CHAT, _chat("hi", max_tokens=2, response_format=named)


def _object(properties: int, *, optional: bool = False) -> dict[str, object]:
    names = [f"p{number}" for number in range(properties)]
    required = {} if optional else {"required": names}
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, **required}


def _structured(**constraint: object) -> tuple[str, bytes]:
    return CHAT, _chat("hi", max_tokens=2, structured_outputs=constraint)


def _keys(count: int) -> dict[str, object]:
    return {f"k{number}": 1 for number in range(count)}


# Name: path and body. A body of more than 4.8 MB is beyond the default `server.limits.max_body`.
BODIES: dict[str, Callable[[], tuple[str, bytes]]] = {
    "harmless": lambda: (EMBED, _embed("hello")),
    "32 MB of texts": lambda: (EMBED, _embed(["a"] * 8_000_000)),
    "28 MB of unknown keys": lambda: (CHAT, _chat("hi", **_keys(2_200_000))),
    "30 MB key": lambda: (CHAT, _chat("hi", **{"k" * 30_000_000: 1})),
    "30 MB text": lambda: (CHAT, _chat("word " * 6_000_000)),
    "million negative ids": lambda: (EMBED, _embed([-1] * 1_000_000)),
    "4.7 MB of brackets": lambda: (CHAT, b"[" * 4_700_000),
    "4.7 MB of texts": lambda: (EMBED, _embed(["a"] * 1_170_000)),
    "400,000 negative ids": lambda: (EMBED, _embed([-1] * 399_000)),
    "negative id at the end": lambda: (EMBED, _embed([1] * 399_000 + [-1])),
    "19,000 unknown keys": lambda: (CHAT, _chat("hi", **_keys(19_000))),
    "4.7 MB key": lambda: (CHAT, _chat("hi", **{"k" * 4_700_000: 1})),
    "4.7 MB value": lambda: (CHAT, _chat("hi", temperature="v" * 4_700_000)),
    "4.7 MB text": lambda: (CHAT, _chat("word " * 940_000)),
    "2.4 MB text": lambda: (TEXT, json.dumps({"model": "tiny-llama", "prompt": "x" * 2_400_000}).encode()),
    "32 KB text": lambda: (CHAT, _chat("x" * 32_000)),
    "schema": lambda: _schema(_object(10)),
    "known schema": lambda: _schema(_object(10)),
    "2,000 optional properties": lambda: _schema(_object(2_000, optional=True)),
    "1,000 optional properties": lambda: _schema(_object(1_000, optional=True)),
    "20,000 properties": lambda: _schema({"allOf": [_object(900) for _ in range(22)]}),
    "maxLength of a million": lambda: _schema({"type": "string", "maxLength": 1_000_000}),
    "100,000 choices": lambda: _structured(choice=[f"choice {number}" for number in range(100_000)]),
    "200 KB regular expression": lambda: _structured(regex="a" * 200_000),
    "60 KB regular expression": lambda: _structured(regex="|".join(f"w{n}x[a-z]+" for n in range(5_000))),
    "ambiguous grammar": lambda: _structured(
        grammar="root ::= a a a a a a a a\na ::= [a-z]* [a-z ]* [a-z]* [a-z ]*"
    ),
    "n and logprobs": lambda: (CHAT, _chat("hi", n=128, logprobs=True, top_logprobs=20, max_tokens=400)),
}


@dataclass(frozen=True, slots=True)
class BodyCost:
    """Cost of one body; MB are 10^6 bytes, waits are the longest while it was in the server."""

    name: str
    body_mb: float
    status: int
    reply_s: float
    health_port_wait_ms: float
    health_wait_ms: float
    other_wait_ms: float
    reply_bytes: int
    peak_growth_mb: float
    growth_mb: float


class Prober:
    """Sends one request after the other on a kept-alive connection and keeps the longest wait."""

    def __init__(self, port: int, method: str, path: str, body: bytes | None = None) -> None:
        self.longest = 0.0
        self._request = (method, path, body, {"authorization": f"Bearer {_KEYS['other']}"})
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.is_set():
            start = time.perf_counter()
            self._connection.request(*self._request)
            response = self._connection.getresponse()
            response.read()
            self.longest = max(self.longest, time.perf_counter() - start)
            if response.status != 200:
                raise RuntimeError(f"{self._request[1]} returned {response.status}")
            self._end.wait(0.005)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Probes until the block ends."""
        self._thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._thread.join()


def memory_mb(process_id: int, key: str = "VmRSS") -> float:
    """A size of /proc/PID/status: VmRSS, or VmHWM, the largest one since the last reset."""
    status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1_024 / 1e6


def send(
    port: int,
    path: str,
    body: bytes,
    replies: list[tuple[int, float, int]],
    key: str = _KEYS["attacker"],
) -> None:
    """Posts one body and appends its status (0: closed without a reply), seconds and bytes of the reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.putrequest("POST", path)
    connection.putheader("authorization", f"Bearer {key}")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(len(body)))
    connection.endheaders()
    # A body refused by its length is not read; the reply may still be.
    with suppress(ConnectionError):
        connection.send(body)
    start = time.perf_counter()
    try:
        response = connection.getresponse()
        reply = (response.status, time.perf_counter() - start, len(response.read()))
    except ConnectionError:
        reply = (0, time.perf_counter() - start, 0)
    connection.close()
    replies.append(reply)


def cost_of(server: Server, health_port: int, name: str, senders: int) -> BodyCost:
    """Sends one body from `senders` connections at once."""
    path, body = BODIES[name]()
    process_id = server.process_id
    if process_id is None:
        raise RuntimeError(f"{server.name} is not running")
    before = memory_mb(process_id, "VmRSS")
    Path(f"/proc/{process_id}/clear_refs").write_text("5", encoding="ascii")
    replies: list[tuple[int, float, int]] = []
    own, health = Prober(health_port, "GET", "/health"), Prober(server.port, "GET", "/health")
    other = Prober(server.port, "POST", EMBED, _embed("hello"))
    with own.running(), health.running(), other.running():
        sending = [
            threading.Thread(target=send, args=(server.port, path, body, replies)) for _ in range(senders)
        ]
        for thread in sending:
            thread.start()
        for thread in sending:
            thread.join()
        time.sleep(_REST_SECONDS)
    return BodyCost(
        name=name,
        body_mb=round(len(body) / 1e6, 2),
        status=max(status for status, _, _ in replies),
        reply_s=round(max(seconds for _, seconds, _ in replies), 3),
        health_port_wait_ms=round(1e3 * own.longest, 1),
        health_wait_ms=round(1e3 * health.longest, 1),
        other_wait_ms=round(1e3 * other.longest, 1),
        reply_bytes=max(size for _, _, size in replies),
        peak_growth_mb=round(memory_mb(process_id, "VmHWM") - before, 1),
        growth_mb=round(memory_mb(process_id, "VmRSS") - before, 1),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hostile_input", description=__doc__)
    parser.add_argument("--body", nargs="*", choices=list(BODIES), default=list(BODIES))
    parser.add_argument("--senders", type=int, default=1, help="connections that send each body at once")
    add_results(parser)
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        health_port = free_port()
        config = CONFIG | {"server": {"health_port": health_port}}
        described = tandem_server(config, Path(folder) / "tandem.yaml")
        with serving(described, Path(folder) / "tandem.log") as server:
            found = []
            for name in options.body:
                found.append(asdict(cost_of(server, health_port, name, options.senders)))
                print(json.dumps(found[-1]), flush=True)
    if options.results is not None:
        write_json(options.results, {"senders": options.senders, "bodies": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
