"""Measures what the decision log costs: microseconds a request, and compressed bytes a million requests.

A simulated run gives ended requests with their decisions. Their rows are then built and written to a folder
as by the server, with the ids that it makes (16 hexadecimal digits and a serial number) or with UUIDs of
clients; the median of the rounds is printed. `build_us` is spent on the event loop, `write_us` and
`compress_us` in the writer's thread. With `--fields` it prints what each field takes instead: the compressed
bytes of a request that its rows lack without the field. Sizes are the same on every machine. A row `sample`,
of which there is one each second, is measured among the rows of requests.

    python -m benchmark_control_plane.experiments.gate.decision_log_cost [--requests 3000] [--rounds 5]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from uuid import UUID

import numpy as np

from backends.cost_models.step_time import affine, embedding_line, llm_only, sequential
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import (
    Offered,
    SimulatedEmbedding,
    SimulatedRequest,
    arrival_times,
    simulate,
)
from controlplane.config import Config
from controlplane.service.decision_log.decision_log import DecisionLog, decision_log_of
from controlplane.service.decision_log.log_rows import Row
from controlplane.service.decision_log.reader import read_log
from controlplane.service.decision_log.segment_files import SegmentFiles, segments
from controlplane.service.runtime.timers import MonotonicClock
from controlplane.service.service import Service
from controlplane.service.ticket import Ticket

# A device of 20 ms a step that 30 requests/s overload in part.
_MACHINE = Machine(
    sequential(llm_only(affine(0.02, 1e-4, 1e-4, 1e-7)), embedding_line(0.005, 1e-5)),
    kv_bytes=4_000 * 16 * 1_024,
    max_running=64,
)
_CLASSES = {
    "interactive": {"priority": 5, "ttft_ms": 1_000, "tpot_ms": 60},
    "standard": {"priority": 1, "default": True, "sheddable": False},
}
_RATE = 30.0


def offered(count: int) -> list[Offered]:
    """Three chat requests with a shared system prompt to one embedding request, in bursts."""
    rng = np.random.default_rng(0)
    found: list[Offered] = []
    for n, at in enumerate(arrival_times(rng, _RATE, count, variation=2.0)):
        name = "interactive" if n % 3 else "standard"
        if n % 4 == 0:
            found.append(SimulatedEmbedding(at, (int(rng.integers(5, 400)),), name))
            continue
        prompt, output = int(rng.integers(100, 900)), int(rng.geometric(1 / 120))
        request = SimulatedRequest(at, prompt, min(output, 1_000), 1_024, name)
        found.append(replace(request, prefix_group=n % 5, prefix_tokens=96))
    return found


def logged_run(count: int) -> tuple[list[Ticket], Config, list[Row]]:
    """The tickets of a simulated run in the order in which they ended, its configuration, and samples.

    Samples are the rows `sample` of its log, of which there is one each second.
    """
    tickets: list[Ticket] = []
    configs: list[Config] = []

    def observe(service: Service) -> None:
        service.gate.dispatcher.accounting.on_end.append(tickets.append)
        configs.append(service.config)

    with tempfile.TemporaryDirectory() as name:
        sections = {"classes": _CLASSES, "decision_log": {"dir": name}}
        simulate(offered(count), _MACHINE, sections, on_start=observe)
        samples = list(read_log(Path(name)).samples)
    return tickets, configs[0], samples


def with_ids(tickets: Sequence[Ticket], *, of_clients: bool) -> None:
    """Gives the requests ids of clients (UUIDs) or those that the server makes without one."""
    random = Random(0)
    for number, ticket in enumerate(tickets):
        bits = random.getrandbits(128)
        unique = str(UUID(int=bits, version=4)) if of_clients else f"{bits >> 64:016x}"
        ticket.request = replace(ticket.request, id=f"{unique}-{number}")


def measured(tickets: Sequence[Ticket], config: Config, sample: float) -> dict[str, float]:
    """The cost of one round."""
    with tempfile.TemporaryDirectory() as name:
        log = _log(config, sample, Path(name))
        began = time.process_time()
        rows = [log._request_row(ticket) for ticket in tickets]
        build = time.process_time() - began
        began = time.process_time()
        # In batches, as the thread takes what has queued up.
        for start in range(0, len(rows), 16):
            log.writer._write(rows[start : start + 16])
        write = time.process_time() - began
        began = time.process_time()
        log.writer.close()
        compress = time.process_time() - began
        (file,) = segments(Path(name))
        size, count = file.stat().st_size, len(tickets)
    return {
        "build_us": 1e6 * build / count,
        "write_us": 1e6 * write / count,
        "compress_us": 1e6 * compress / count,
        "compressed_mb_per_million": size / count,
    }


def sample_row_bytes(tickets: Sequence[Ticket], config: Config, samples: Sequence[Row]) -> float:
    """Compressed bytes of a row `sample` among the rows of requests, by the default share with numbers."""
    with tempfile.TemporaryDirectory() as name:
        log = _log(config, config.decision_log.sample, Path(name))
        rows = [log._request_row(ticket) for ticket in tickets]
        # Those read have the times of the simulation, and the run that a reader adds.
        memory = [{**row, "at": log._at(1_000 * row["at"])} for row in samples]
    for row in memory:
        del row["run"]
    among = sorted([*rows, *memory], key=lambda row: row["at"] + 1_000 * row.get("e2e_ms", 0))
    return (len(among) * _size(among) - len(rows) * _size(rows)) / len(memory)


def field_bytes(tickets: Sequence[Ticket], config: Config, sample: float) -> dict[str, float]:
    """Compressed bytes a request that a log lacks without each field, largest first; of all at first."""
    with tempfile.TemporaryDirectory() as name:
        log = _log(config, sample, Path(name))
        rows = [log._request_row(ticket) for ticket in tickets]
    whole = _size(rows)
    keys = sorted({(key,) for row in rows for key in row if key != "row"})
    inner = sorted({("decisions", key) for row in rows for each in row["decisions"] for key in each})
    saved = {".".join(path): whole - _size([_without(row, path) for row in rows]) for path in keys + inner}
    ordered = sorted(saved, key=lambda path: -saved[path])
    return {path: round(size, 2) for path, size in [("all", whole), *((p, saved[p]) for p in ordered)]}


def _without(row: Row, path: Sequence[str]) -> Row:
    first, *rest = path
    if not rest:
        return {key: value for key, value in row.items() if key != first}
    return {**row, first: [_without(each, rest) for each in row[first]]}


def _size(rows: Sequence[Row]) -> float:
    """Compressed bytes a row."""
    with tempfile.TemporaryDirectory() as name:
        files = SegmentFiles(Path(name), "run", lambda segment: {"row": "segment"}, keep_bytes=1 << 40)
        files.write(rows)
        files.close()
        (file,) = segments(Path(name))
        return file.stat().st_size / len(rows)


def _log(config: Config, sample: float, folder: Path) -> DecisionLog:
    section = replace(config.decision_log, dir=folder, sample=sample)
    log = decision_log_of(replace(config, decision_log=section), dict, {}, MonotonicClock())
    assert log is not None
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fields", action="store_true", help="print what each field takes")
    options = parser.parse_args()
    tickets, config, samples = logged_run(options.requests)
    outcomes = {str(ticket.outcome) for ticket in tickets}
    decisions = sum(len(ticket.history) for ticket in tickets) / len(tickets)
    found: dict[str, object] = {
        "requests": len(tickets),
        "decisions_per_request": round(decisions, 2),
        "outcomes": {
            name: sum(str(ticket.outcome) == name for ticket in tickets) for name in sorted(outcomes)
        },
    }
    for ids, of_clients in (("the server's ids", False), ("clients' UUIDs", True)):
        with_ids(tickets, of_clients=of_clients)
        found[f"a row each second among {ids}"] = round(sample_row_bytes(tickets, config, samples), 1)
        if options.fields:
            found[ids] = field_bytes(tickets, config, 0.1)
            continue
        for sample in (0.0, 0.1, 1.0):
            rounds = [measured(tickets, config, sample) for _ in range(options.rounds)]
            found[f"{ids}, sample {sample:g}"] = {
                key: round(median(each[key] for each in rounds), 2) for key in rounds[0]
            }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
