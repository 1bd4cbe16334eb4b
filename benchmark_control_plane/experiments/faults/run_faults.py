"""Injects each fault of the suite into a server under load, several times, and accounts for every request.

Each row prints: requests sent and lost (without an answer or an error), bytes and requests that the ledger
still holds after, seconds until `/ready` stated a death and until it was 200 again, and the longest waits of
another tenant for `/health` and a short chat, memory of the server and its children above that before, and
what is above its limit. Rows whose fault is in a process, a text or the speed of the
engines run on real ones (tiny-llama and MiniLM on the CPU), the others on simulated engines. Rows that are in
`--results` already are not repeated.

    python -m benchmark_control_plane.experiments.faults.run_faults
        [--groups GROUP ...] [--rows ROW ...] [--runs 3] [--results FILE]
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.results_file import add_results, read_previous, write_json
from benchmark_control_plane.common.servers import interrupt_on_sigterm
from benchmark_control_plane.experiments.faults import client_faults, control_faults, machine_faults
from benchmark_control_plane.experiments.faults.server_under_test import (
    ServerUnderTest,
    started,
    wait_until_ready,
)
from benchmark_control_plane.experiments.faults.trial import FaultRow, Found, run_trial

SIMULATED = {**client_faults.SIMULATED, **control_faults.SIMULATED, **machine_faults.SIMULATED}
ENDING, AT_START = control_faults.ENDING, machine_faults.AT_START
REAL: Mapping[str, Mapping[str, FaultRow]] = {
    "engine": machine_faults.ENGINE_FAULTS,
    "worker": {**machine_faults.WORKER_FAULTS, **machine_faults.DISK},
    "clients": client_faults.REAL,
    "bodies": client_faults.BODIES,
}
GROUPS: Mapping[str, Sequence[str]] = {
    **{group: tuple(rows) for group, rows in REAL.items()},
    "simulated": tuple(SIMULATED),
    "ending": tuple(ENDING),
    "start": tuple(AT_START),
}
ROWS: Mapping[str, FaultRow] = {
    **{row: fault for rows in REAL.values() for row, fault in rows.items()},
    **SIMULATED,
    **ENDING,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every claim holds, 1 if one does not."""
    parser = argparse.ArgumentParser(prog="run_faults", description=__doc__)
    parser.add_argument("--groups", nargs="*", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--rows", nargs="*", help="only these rows of the groups")
    parser.add_argument("--runs", type=int, default=3)
    add_results(parser)
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    known: list[dict[str, Any]] = read_previous(options.results).get("trials", [])
    seen = {(trial["row"], trial["run"]) for trial in known}
    found: list[Found] = []
    print(HEAD, flush=True)
    for number in range(options.runs):
        for group in options.groups:
            rows = [
                row
                for row in GROUPS[group]
                if (row, number) not in seen and row in (options.rows or GROUPS[group])
            ]
            for each in _trials(group, rows, number) if rows else ():
                found.append(each)
                print(line(asdict(each)), flush=True)
                if options.results is not None:
                    write_json(options.results, {"trials": known + [asdict(one) for one in found]})
    return int(any(each.failures for each in found))


def _trials(group: str, rows: Sequence[str], number: int) -> Iterator[Found]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if group == "start":
            for row in rows:
                yield machine_faults.start_trial(row, number, folder)
            return
        if group == "ending":
            for row in rows:
                with _serving(folder, group) as server:
                    yield _trial(row, number, server)
            return
        disk = None
        if group == "worker":
            disk = stack.enter_context(machine_faults.small_disk(folder))
            if disk is None:
                print("full disk: left out, because only root may mount a file system", flush=True)
                rows = [row for row in rows if row not in machine_faults.DISK]
        server = stack.enter_context(_serving(folder, group, disk))
        for row in rows:
            yield _trial(row, number, server)


@contextmanager
def _serving(folder: Path, group: str, disk: Path | None = None) -> Iterator[ServerUnderTest]:
    kind = {"is_real": group in REAL, "has_grammars": group == "bodies"}
    with started(folder, **kind, disk=disk) as server:
        wait_until_ready(server)
        yield server


def _trial(row: str, number: int, server: ServerUnderTest) -> Found:
    return asyncio.run(run_trial(row, number, ROWS[row], server))


HEAD = (
    f"{'row':38} run  sent lost  held open  503 after  back after  exit  /health ms  own port  chat ms  "
    "MB peak, left  failures; above a limit"
)


def line(trial: Mapping[str, Any]) -> str:
    """One row of the table; a dash where there is no figure."""

    after = trial["after"]

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:g}"

    return (
        f"{trial['row']:38} {trial['run']:3} {trial['sent']:5} {trial['lost']:4} "
        f"{shown(after['held_bytes']):>5} {shown(after['open_requests']):>4} "
        f"{shown(trial['not_ready_s']):>10} {shown(trial['back_s']):>11} "
        f"{shown(trial['exit_status']):>5} {trial['health_ms']:11g} "
        f"{trial['health_port_ms']:9g} {trial['other_chat_ms']:8g} {shown(after['peak_growth_mb']):>8} "
        f"{shown(after['growth_mb']):>5}  {'; '.join(trial['failures']) or 'none'}"
        f"; {'; '.join(trial['slow']) or 'none'}"
    )


if __name__ == "__main__":
    sys.exit(main())
