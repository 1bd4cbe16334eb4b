"""Faults of processes and of the machine: deaths, hangs, no memory, a full disk and a clock that jumps."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmark_control_plane.experiments.faults.clients import EMBEDDINGS, LOST, ask, new_client
from benchmark_control_plane.experiments.faults.server_under_test import (
    EMBED_MODEL,
    ENGINE,
    WORKER,
    ServerUnderTest,
    started,
)
from benchmark_control_plane.experiments.faults.simulated_server import CLOCK_FILE, CLOCK_SIGNAL
from benchmark_control_plane.experiments.faults.trial import FaultRow, Found, Trial

# An engine has its name only once it has imported vLLM, for which a busy machine takes more than a minute.
_APPEARS_S = 240.0
_POLL_S = 0.02
_DISK_BYTES = 16 * 2**20
# A server that cannot start ends within this time, also while other processes use the cores.
_ENDS_S = 60.0
# Three samples of one a second, with as much again for a busy machine.
_GOES_ON_S = 6.0
# The largest pass needs more than is spared; the worker then halves it.
_SPARE_BYTES = 8 * 2**20
_LONG_TEXTS = {"model": EMBED_MODEL, "input": ["memory " * 200] * 32}


async def _child(server: ServerUnderTest, named: str, *, but: int | None = None) -> int:
    """The process id of the server's engine or worker, other than `but`. Raises TimeoutError."""
    async with asyncio.timeout(_APPEARS_S):
        # Another process makes no event of its start.
        while (found := server.child(named)) is None or found == but:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
    return found


def _signalled(named: str, number: signal.Signals, *, times: int = 1) -> FaultRow:
    """A fault that sends the signal to the engine or the worker, and again to its successors.

    A successor is killed as soon as it appears, and stopped when it serves: a start has no bound for a hang.
    """

    async def inject(trial: Trial) -> None:
        last: int | None = None
        for _ in range(times):
            last = await _child(trial.server, named, but=last)
            os.kill(last, number)
            trial.died()
            await trial.until_down()
            if number == signal.SIGSTOP:
                await trial.until_back()

    return FaultRow(inject, is_death=number == signal.SIGKILL)


def _address_space(process_id: int) -> int:
    pages = int(Path(f"/proc/{process_id}/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


async def _without_memory(trial: Trial) -> None:
    """The worker can allocate no more than it has, for as long as some requests take."""
    worker = await _child(trial.server, WORKER)
    limit = _address_space(worker) + _SPARE_BYTES
    before = resource.prlimit(worker, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        async with new_client(trial.server) as http:
            endings = [await ask(http, EMBEDDINGS, _LONG_TEXTS, "load") for _ in range(3)]
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(worker, resource.RLIMIT_AS, before)
    trial.lost += Counter(ending for ending in endings if ending.startswith(LOST))
    metrics = await asyncio.to_thread(trial.server.metrics)
    trial.notes |= {
        "endings without memory": endings,
        "batches split": metrics["tandem_embedding_out_of_memory_total"],
        "worker restarts": metrics["tandem_embedding_restarts_total"],
    }


async def _full_disk(trial: Trial) -> None:
    """Nothing more can be written to the disk of log, checkpoint and decision log."""
    filler = trial.server.disk / "filler"
    begin = (await asyncio.to_thread(trial.server.metrics))["tandem_decision_log_rows_total"]
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4_096))
        await asyncio.sleep(4.0)
    finally:
        filler.unlink()
    metrics = await asyncio.to_thread(trial.server.metrics)
    trial.notes["rows of the decision log"] = metrics["tandem_decision_log_rows_total"] - begin


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of 16 MiB of its own; None without the right to mount one."""
    if os.geteuid() != 0:
        yield None
        return
    place = folder / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


async def _clock_jumps(trial: Trial) -> None:
    """The wall clock goes a day ahead, two days back and to the right time, and periodic work goes on."""
    server = trial.server
    for days in (1, -1, 0):
        server.config_file.with_name(CLOCK_FILE).write_text(str(86_400.0 * days), encoding="ascii")
        begin, before = time.monotonic(), server.last_sample()
        os.kill(server.process.pid, CLOCK_SIGNAL)
        samples = {before}
        # The first sample may have been due before the clock was set.
        while len(samples) < 4 and time.monotonic() < begin + _GOES_ON_S:
            await asyncio.sleep(_POLL_S)
            samples.add(server.last_sample())
        took = round(time.monotonic() - begin, 2)
        trial.notes[f"seconds until the third sample at {days:+} d"] = took
        if len(samples) < 4:
            trial.failures.append(f"{len(samples) - 1} samples within {took} s with the clock at {days:+} d")


def _ended_at_start(named: str, number: signal.Signals, folder: Path) -> Mapping[str, object]:
    """What becomes of a server whose engine or worker gets a signal as soon as it appears.

    A hang has no bound at the first start, so that the server is then asked to end.
    """
    begin = time.monotonic()
    with started(folder, is_real=True) as server:
        child = asyncio.run(_child(server, named))
        at = time.monotonic()
        os.kill(child, number)
        if number == signal.SIGSTOP:
            time.sleep(1.0)
            server.process.terminate()
        try:
            status: int | None = server.process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            status = None
        found: dict[str, object] = {"exit_status": status, "ended_s": round(time.monotonic() - at, 2)}
        found["left_behind"] = sorted(_of_session(server.process.pid))
        return found | {"child_appeared_s": round(at - begin, 2)}


def _of_session(leader: int) -> Iterator[str]:
    """Command lines of the processes of a session that still run."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, *fields = stat.read_text(encoding="utf-8").rpartition(") ")[2].split()
            if int(fields[2]) == leader and state != "Z":
                yield (stat.parent / "cmdline").read_text(encoding="utf-8").replace("\0", " ")[:80]


def start_trial(name: str, number: int, folder: Path) -> Found:
    """Runs one row of AT_START."""
    named, sent, wanted = AT_START[name]
    try:
        notes = dict(_ended_at_start(named, sent, folder))
    except TimeoutError:
        failures = [f"{named} did not appear within {_APPEARS_S:g} s"]
        return Found(row=name, run=number, failures=failures, notes={}, exit_status=None)
    status = notes.pop("exit_status")
    assert status is None or isinstance(status, int)
    failures = [] if status == wanted else [f"exit status {status} instead of {wanted}"]
    failures += [f"left behind: {notes['left_behind']}"] if notes["left_behind"] else []
    return Found(row=name, run=number, failures=failures, notes=notes, exit_status=status)


ENGINE_FAULTS: Mapping[str, FaultRow] = {
    "engine killed": _signalled(ENGINE, signal.SIGKILL),
    "engine stopped": _signalled(ENGINE, signal.SIGSTOP),
    "engine killed, and its successor": _signalled(ENGINE, signal.SIGKILL, times=2),
    "engine stopped, and its successor": _signalled(ENGINE, signal.SIGSTOP, times=2),
}
WORKER_FAULTS: Mapping[str, FaultRow] = {
    "worker killed": _signalled(WORKER, signal.SIGKILL),
    "worker stopped": _signalled(WORKER, signal.SIGSTOP),
    "worker killed, and its successor": _signalled(WORKER, signal.SIGKILL, times=2),
    "worker stopped, and its successor": _signalled(WORKER, signal.SIGSTOP, times=2),
    "worker without memory": FaultRow(_without_memory),
}
DISK: Mapping[str, FaultRow] = {"full disk": FaultRow(_full_disk)}
SIMULATED: Mapping[str, FaultRow] = {"wall clock jumps": FaultRow(_clock_jumps)}
AT_START: Mapping[str, tuple[str, signal.Signals, int]] = {
    "engine killed at start": (ENGINE, signal.SIGKILL, 1),
    "engine stopped at start, then SIGTERM": (ENGINE, signal.SIGSTOP, 0),
    "worker killed at start": (WORKER, signal.SIGKILL, 1),
    "worker stopped at start, then SIGTERM": (WORKER, signal.SIGSTOP, 0),
}
"""Process, signal and the exit status that the server then has."""
