"""Replays configurations on blocks in several processes, and remembers every result in a file.

The search draws its trials from a seed and from results alone. So an interrupted command that runs again
finds what it had done in the file and goes on from there, in whatever stage it was.
"""

import hashlib
import json
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from benchmark_control_plane.decision_replay.replayed_requests import RequestResult, replayed_results
from benchmark_control_plane.tuning.batch_budgets import with_budgets
from benchmark_control_plane.tuning.blocks import Block
from benchmark_control_plane.tuning.time_budget import TimeBudget, TimeIsOver
from controlplane.config import ConfigError

Sections = Mapping[str, Any]
Job = tuple[Sections, int]
"""Sections of a configuration, and the number of a block."""
LOAD = "load"
"""The section that states at what multiple of the log's load a block is replayed."""


@dataclass(frozen=True, slots=True)
class BlockResult:
    """The judged requests of a block as a configuration ends them, or why the server refuses it."""

    requests: Sequence[RequestResult]
    seconds: float
    refused: str | None = None


@dataclass(slots=True)
class Evaluator:
    """Results by configuration and block, computed where they are not known yet.

    Attributes:
        blocks: blocks that jobs name by number.
        file: results are appended to it.
        pool: runs the replays; None runs them here.
        time: the time of the command; it counts each result, those of earlier runs when they are first used.
        known: results by digest and block.
    """

    blocks: Sequence[Block]
    file: TextIO
    pool: Executor | None
    time: TimeBudget
    known: dict[tuple[str, int], BlockResult] = field(default_factory=dict)
    _unused: set[tuple[str, int]] = field(default_factory=set)

    def results(self, jobs: Sequence[Job]) -> list[BlockResult]:
        """The result of each job, in order. Raises TimeIsOver instead of a replay that would end late."""
        named = [(digest_of(sections), number) for sections, number in jobs]
        if earlier := self._unused.intersection(named):
            self._unused -= earlier
            self.time.taken_over([self.known[name].seconds for name in sorted(earlier)])
        missing = {
            name: sections for name, (sections, _) in zip(named, jobs, strict=True) if name not in self.known
        }
        for name, result in self._computed(missing):
            self.known[name] = result
            self.time.measured(result.seconds)
            self.file.write(json.dumps(_row(name, result)) + "\n")
            self.file.flush()
        return [self.known[name] for name in named]

    def remember(self, lines: Iterable[str]) -> None:
        """Takes the results of earlier runs; a torn last line is left out."""
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            requests = [RequestResult(outcome, latency) for outcome, latency in row["requests"]]
            name = row["configuration"], row["block"]
            self.known[name] = BlockResult(requests, row["seconds"], row["refused"])
            self._unused.add(name)

    def _computed(self, missing: Mapping[tuple[str, int], Sections]) -> Iterator[tuple[Any, BlockResult]]:
        if self.pool is None:
            for name, sections in missing.items():
                self._check_time()
                yield name, replayed(self.blocks[name[1]], sections)
            return
        if missing:
            self._check_time()
        with _signals_wait():
            futures = {
                self.pool.submit(_replayed_there, name[1], sections): name
                for name, sections in missing.items()
            }
        try:
            for done in as_completed(futures):
                yield futures[done], done.result()
                if not all(each.done() for each in futures):
                    self._check_time()
        finally:
            for each in futures:
                each.cancel()

    def _check_time(self) -> None:
        if not self.time.fits(1):
            raise TimeIsOver


def digest_of(sections: Sections) -> str:
    """A name of the configuration: equal sections have equal names."""
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:16]


def replayed(block: Block, sections: Sections) -> BlockResult:
    """Replays one block."""
    start = perf_counter()
    machine, rest = with_budgets(block.traffic.machine, sections)
    traffic, rest = _at_load(block.traffic, rest)
    try:
        found = replayed_results(traffic, rest, machine=machine, is_block=True)
    except ConfigError as error:
        return BlockResult([], perf_counter() - start, str(error))
    return BlockResult(found[block.first : block.last], perf_counter() - start)


def _at_load(traffic: RecordedTraffic, sections: Sections) -> tuple[RecordedTraffic, Sections]:
    """The traffic of a block at the load that the sections state, and the other sections."""
    load = sections.get(LOAD)
    if load is None:
        return traffic, sections
    start = traffic.rows[0]["at"]
    rows = [{**row, "at": start + round((row["at"] - start) / load)} for row in traffic.rows]
    return replace(traffic, rows=rows), {name: part for name, part in sections.items() if name != LOAD}


@contextmanager
def evaluator(
    blocks: Sequence[Block], path: Path, *, fingerprint: str, time: TimeBudget
) -> Iterator[Evaluator]:
    """An evaluator whose results are in the file `path`, with those that are there already.

    It runs `time.processes` replays at a time.

    Raises BadInput if the file belongs to other blocks or is none of these files.
    """
    head = json.dumps({"tandem_tune": 1, "of": fingerprint})
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if lines and lines[0] != head:
        raise BadInput(f"{path}: not of this log and release; remove it to begin anew, or give another --out")
    with path.open("a", encoding="utf-8") as file:
        # A torn last line must not swallow the next one.
        file.write("\n" if lines else head + "\n")
        file.flush()
        if time.processes == 1:
            found = Evaluator(blocks, file, None, time)
            found.remember(lines[1:])
            yield found
            return
        context = get_context("spawn")
        with ProcessPoolExecutor(time.processes, context, _take, (blocks,)) as pool:
            found = Evaluator(blocks, file, pool, time)
            found.remember(lines[1:])
            try:
                yield found
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


_here: list[Block] = []


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Keeps signals to the whole group from the workers that start here: the command answers them afterwards.

    A process has the signal mask of the thread that started it, from its first instruction to its end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _take(blocks: Sequence[Block]) -> None:
    """Gives a worker its blocks."""
    _here[:] = blocks


def _replayed_there(number: int, sections: Sections) -> BlockResult:
    return replayed(_here[number], sections)


def _row(name: tuple[str, int], result: BlockResult) -> dict[str, Any]:
    return {
        "configuration": name[0],
        "block": name[1],
        "seconds": round(result.seconds, 3),
        "refused": result.refused,
        "requests": [[each.outcome, each.latency_ms] for each in result.requests],
    }
