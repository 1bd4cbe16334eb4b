"""Measures what the decision log costs: microseconds a request, and compressed bytes a million requests.

A simulated run gives ended requests with their decisions. Their rows are then built and written to a folder
as by the server, with request ids as the server makes them (a UUID and a serial number); the median of the
rounds is printed. `build_us` is spent on the event loop, `write_us` and `compress_us` in the writer's thread.

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
from benchmark_control_plane.simulator.simulation import (
    Machine,
    Offered,
    SimulatedEmbedding,
    SimulatedRequest,
    arrival_times,
    simulate,
)
from controlplane.config import Config
from controlplane.service.decision_log.decision_log import decision_log_of
from controlplane.service.decision_log.segment_files import segments
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


def ended_tickets(count: int) -> tuple[list[Ticket], Config]:
    """The tickets of a simulated run in the order in which they ended, and its configuration."""
    tickets: list[Ticket] = []
    configs: list[Config] = []

    def observe(service: Service) -> None:
        service.gate.dispatcher.accounting.on_end.append(tickets.append)
        configs.append(service.config)

    simulate(offered(count), _MACHINE, {"classes": _CLASSES}, on_start=observe)
    random = Random(0)
    for number, ticket in enumerate(tickets):
        unique = UUID(int=random.getrandbits(128), version=4)
        ticket.request = replace(ticket.request, id=f"{unique}-{number}")
    return tickets, configs[0]


def measured(tickets: Sequence[Ticket], config: Config, sample: float) -> dict[str, float]:
    """The cost of one round."""
    with tempfile.TemporaryDirectory() as name:
        section = replace(config.decision_log, dir=Path(name), sample=sample)
        log = decision_log_of(replace(config, decision_log=section), dict, {}, MonotonicClock())
        assert log is not None
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    tickets, config = ended_tickets(options.requests)
    outcomes = {str(ticket.outcome) for ticket in tickets}
    decisions = sum(len(ticket.history) for ticket in tickets) / len(tickets)
    found: dict[str, object] = {
        "requests": len(tickets),
        "decisions_per_request": round(decisions, 2),
        "outcomes": {
            name: sum(str(ticket.outcome) == name for ticket in tickets) for name in sorted(outcomes)
        },
    }
    for sample in (0.0, 0.1, 1.0):
        rounds = [measured(tickets, config, sample) for _ in range(options.rounds)]
        found[f"sample {sample:g}"] = {
            key: round(median(each[key] for each in rounds), 2) for key in rounds[0]
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
