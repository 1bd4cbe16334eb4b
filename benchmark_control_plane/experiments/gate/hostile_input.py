"""Lets attackers send requests that are meant to exhaust the server, and measures what others notice of it.

Each request of `hostile_requests` is sent once alone, and then by `--senders` processes for `--seconds`, each
again half a second after its reply. Meanwhile a process of raised priority asks for `/health` on both ports
and streams short completions of another tenant in the interactive class. What does not hold of the
following is named, and the last lines count it:

- alone, a refusal comes within 100 ms of the last byte (one by a limit of time or rate may come later);
- `/health` never waits longer than 100 ms;
- of the other tenant's SLOs at most 5 % more are missed than before the attacks;
- the memory of the server and its children is at most 300 MB above that at rest, during the attack and after.

    python -m benchmark_control_plane.experiments.gate.hostile_input
        [--names NAME ...] [--senders 10] [--seconds 10] [--runs 1] [--results FILE]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.process_memory import TreeMemory
from benchmark_control_plane.common.results_file import add_results, read_previous, write_json
from benchmark_control_plane.common.servers import interrupt_on_sigterm
from benchmark_control_plane.experiments.faults.client_faults import request_bytes
from benchmark_control_plane.experiments.faults.clients import PROBE, before_others, waits_of
from benchmark_control_plane.experiments.faults.server_under_test import (
    KEYS,
    TTFT_MS,
    ServerUnderTest,
    started,
    wait_until_ready,
)
from benchmark_control_plane.experiments.faults.trial import longest_ms
from benchmark_control_plane.experiments.gate.hostile_requests import (
    LIMITED_BY_TIME,
    NAMES,
    Reply,
    request_of,
    send,
    sender_of,
)

MOST_WAIT_MS, MOST_GROWTH_MB, MOST_MISSED_MORE = 100.0, 300.0, 0.05
_HARMLESS = "harmless"
_CHATS_PER_S = 4.0
_PATIENCE_S = 15.0
_PAUSE_S = 0.5
_SAMPLE_S = 0.05
_REST_S = 2.0
# Attackers are other machines: the server does not compete with them for a core.
_ATTACKER_NICENESS = 10


@dataclass(frozen=True, slots=True)
class Seen:
    """What another tenant sees during a phase: the longest waits of /health, and its completions."""

    health_wait_ms: float
    health_port_wait_ms: float
    chats: int
    kept: int

    @property
    def missed_share(self) -> float:
        """Part of the completions that came late or not at all."""
        return 1 - self.kept / max(1, self.chats)


@dataclass(frozen=True, slots=True)
class AttackCost:
    """Cost of one hostile request in one run; MB are 10^6 bytes.

    Attributes:
        status, reply_s: of the request sent alone; status 0: closed without a reply.
        replies: number of replies to the attackers, by status.
        slowest_reply_s: of the attackers' requests.
        before: what the other tenant saw before all attacks.
        missed: part of its SLOs that were missed during this one.
        peak_growth_mb, growth_mb: memory of server and children above that at rest, at most and after.
        peak_by_process, growth_by_process: the same by process, each at its own peak.
        not_held: what does not hold.
    """

    name: str
    run: int
    sent_mb: float
    status: int
    reply_s: float
    replies: dict[str, int]
    slowest_reply_s: float
    reply_bytes: int
    health_port_wait_ms: float
    health_wait_ms: float
    chats: int
    before: Seen
    missed: float
    peak_growth_mb: float
    growth_mb: float
    peak_by_process: dict[str, float] = field(default_factory=dict)
    growth_by_process: dict[str, float] = field(default_factory=dict)
    not_held: tuple[str, ...] = ()

    def broken(self) -> Iterator[str]:
        """Names what does not hold."""
        is_by_time = self.status == 429 or self.name in LIMITED_BY_TIME
        is_late = self.status != 200 and not is_by_time and 1e3 * self.reply_s > MOST_WAIT_MS
        if self.status == 500 or is_late:
            yield "refusal"
        if self.health_port_wait_ms > MOST_WAIT_MS:
            yield "health on its own port"
        if self.health_wait_ms > MOST_WAIT_MS:
            yield "health on the port of the API"
        if self.missed - self.before.missed_share > MOST_MISSED_MORE:
            yield "SLOs"
        if self.peak_growth_mb > MOST_GROWTH_MB:
            yield "memory meanwhile"
        if self.growth_mb > MOST_GROWTH_MB:
            yield "memory after"


def watch(ports: tuple[int, int], pipe: Connection) -> None:
    """Reports `Seen` for each phase, which begins with a message True and ends with the next message.

    It is for a process of its own, which a message False ends. `ports`: of the API and of health alone.
    """
    before_others()
    pipe.send(None)
    while pipe.recv():
        pipe.send(asyncio.run(_phase(ports, pipe)))


async def _phase(ports: tuple[int, int], pipe: Connection) -> Seen:
    end = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), end.set)
    (api, own), chats = await asyncio.gather(
        asyncio.gather(*(waits_of(port, end) for port in ports)), _chats(ports[0], end)
    )
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    pipe.recv()
    return Seen(longest_ms(api), longest_ms(own), len(chats), sum(chats))


async def _chats(port: int, end: asyncio.Event) -> list[bool]:
    """Sends completions at a constant rate; whether each was whole and its first token in time."""
    sent: list[asyncio.Task[bool]] = []
    begin = time.monotonic()
    while not end.is_set():
        sent.append(asyncio.create_task(_is_kept(port)))
        await asyncio.sleep(max(0.0, begin + len(sent) / _CHATS_PER_S - time.monotonic()))
    return list(await asyncio.gather(*sent))


async def _is_kept(port: int) -> bool:
    request = request_bytes({**PROBE, "stream": True}, "other", service_class="interactive")
    begin, first, seen = time.monotonic(), None, b""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            while part := await reader.read(65_536):
                seen += part
                if first is None and b"data: " in seen:
                    first = time.monotonic() - begin
            writer.close()
    except (OSError, TimeoutError):
        return False
    return first is not None and 1e3 * first <= TTFT_MS and b"data: [DONE]" in seen


class Watcher:
    """The process of `watch`."""

    def __init__(self, server: ServerUnderTest) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        ports = (server.port, server.health_port)
        self._process = context.Process(target=watch, args=(ports, theirs), daemon=True)
        self._process.start()
        self._pipe.recv()

    def begin(self) -> None:
        """Begins a phase."""
        self._pipe.send(True)

    def end(self) -> Seen:
        """Ends the phase."""
        self._pipe.send(True)
        seen: Seen = self._pipe.recv()
        return seen

    def stop(self) -> None:
        """Ends the process."""
        self._pipe.send(False)
        self._process.join()


def _attack(port: int, file: Path, seconds: float) -> list[Reply]:
    """Sends the request in `file` for so long, at least once."""
    os.setpriority(os.PRIO_PROCESS, 0, _ATTACKER_NICENESS)
    request, end = file.read_bytes(), time.monotonic() + seconds
    replies = [send(port, request)]
    while time.monotonic() + _PAUSE_S < end:
        time.sleep(_PAUSE_S)
        replies.append(send(port, request))
    return replies


@dataclass(frozen=True, slots=True)
class AttackBench:
    """A server at rest, the other tenant and what it saw before the attacks, and the attackers."""

    server: ServerUnderTest
    watcher: Watcher
    attackers: ProcessPoolExecutor
    memory: TreeMemory
    before: Seen
    folder: Path

    def cost_of(self, name: str, run: int, senders: int, seconds: float) -> AttackCost:
        """Sends one request alone and then from all senders."""
        file, port = self.folder / "request", self.server.port
        file.write_bytes(request_of(name, KEYS[sender_of(name)]))
        self.memory.reset_peak()
        (alone,) = self.attackers.submit(_attack, port, file, 0.0).result()
        self.watcher.begin()
        attacks = [self.attackers.submit(_attack, port, file, seconds) for _ in range(senders)]
        while not all(attack.done() for attack in attacks):
            self.memory.sample()
            time.sleep(_SAMPLE_S)
        seen = self.watcher.end()
        time.sleep(_REST_S)
        replies = [reply for attack in attacks for reply in attack.result()]
        found = AttackCost(
            name=name,
            run=run,
            sent_mb=round(file.stat().st_size / 1e6, 2),
            status=alone.status,
            reply_s=round(alone.seconds, 3),
            replies=dict(Counter(str(reply.status) for reply in replies)),
            slowest_reply_s=round(max(reply.seconds for reply in replies), 3),
            reply_bytes=max(reply.size for reply in [alone, *replies]),
            health_port_wait_ms=seen.health_port_wait_ms,
            health_wait_ms=seen.health_wait_ms,
            chats=seen.chats,
            before=self.before,
            missed=round(seen.missed_share, 4),
            peak_growth_mb=self.memory.peak_growth_mb(),
            growth_mb=self.memory.growth_mb(),
            peak_by_process=self.memory.peak_growth_by_process(),
            growth_by_process=self.memory.growth_by_process(),
        )
        return replace(found, not_held=tuple(found.broken()))


@contextmanager
def _bench(folder: Path, senders: int, seconds: float) -> Iterator[AttackBench]:
    """Starts the server, and watches it for `seconds` before any attack."""
    context = multiprocessing.get_context("spawn")
    with (
        started(folder, is_real=True, has_grammars=True) as server,
        ProcessPoolExecutor(senders, context) as attackers,
    ):
        wait_until_ready(server)
        file = folder / "request"
        file.write_bytes(request_of(_HARMLESS, KEYS[sender_of(_HARMLESS)]))
        # Starts the processes of the attackers, and loads what the server loads at its first request.
        for attack in [attackers.submit(_attack, server.port, file, 2.0) for _ in range(senders)]:
            attack.result()
        watcher = Watcher(server)
        try:
            watcher.begin()
            time.sleep(seconds)
            before = watcher.end()
            print(f"before the attacks: {json.dumps(asdict(before))}", flush=True)
            yield AttackBench(server, watcher, attackers, server.memory(), before, folder)
        finally:
            watcher.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if everything holds, 1 if something does not."""
    parser = argparse.ArgumentParser(prog="hostile_input", description=__doc__)
    parser.add_argument("--names", nargs="*", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--senders", type=int, default=10, help="processes that send each request")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each attack")
    parser.add_argument("--runs", type=int, default=1, help="what is in the results already is not repeated")
    add_results(parser)
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    found: list[dict[str, Any]] = read_previous(options.results).get("attacks", [])
    seen = {(attack["name"], attack["run"]) for attack in found}
    for run in range(options.runs):
        names = [name for name in options.names if (name, run) not in seen]
        if not names:
            continue
        with (
            tempfile.TemporaryDirectory() as folder,
            _bench(Path(folder), options.senders, options.seconds) as bench,
        ):
            for name in names:
                found.append(asdict(bench.cost_of(name, run, options.senders, options.seconds)))
                print(json.dumps(found[-1]), flush=True)
                if options.results is not None:
                    write_json(options.results, {"senders": options.senders, "attacks": found})
    return _summarised(found)


def _summarised(found: Sequence[dict[str, Any]]) -> int:
    """Prints what does not hold, and how often; 1 if there is anything."""
    broken: Counter[tuple[str, str]] = Counter()
    for attack in found:
        broken.update((attack["name"], claim) for claim in attack["not_held"])
    for (name, claim), times in sorted(broken.items()):
        runs = sum(attack["name"] == name for attack in found)
        print(f"{name}: {claim} does not hold in {times} of {runs} runs")
    print(
        f"{len(found)} attacks, {sum(bool(attack['not_held']) for attack in found)} with what does not hold"
    )
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
