"""Measures the CPU cost of the round-model policies: whole runs, single decisions, memory over a trace.

`python -m benchmark_control_plane.round_model.scheduling_cost [--long]` prints JSON. `--long` adds a streamed
run of a million requests and one of a tenth of that. CPU time of this thread, so other processes have
little influence.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backends.cost_models.step_time import LLAMA2_70B_TP1, tile
from benchmark_control_plane.round_model.policies.step_policy import Candidate
from benchmark_control_plane.round_model.schedules import (
    PolicySetting,
    build_policy,
    run_policy,
    sorted_arrivals,
)
from benchmark_control_plane.round_model.simulator import RoundArrival, simulate
from benchmark_control_plane.round_model.workloads import (
    CONVERSATION_MEMORY,
    conversation_lengths,
    poisson_arrivals,
)

_DECIDING = ("mc-sf", "mc-sf-skip", "mc-benchmark", "fcfs", "tandem")
_RUNNING = 256
_WAITING = 1000
_STEPS = 400
_CHUNK = 10_000
_STEADY_RATE = 5.0
"""Requests a second that the 70B model can serve, so the queue does not grow with the trace."""


def whole_run(policy: str, count: int) -> float:
    """CPU seconds to schedule `count` requests that arrive at 50 a second."""
    rng = np.random.default_rng(1)
    requests = poisson_arrivals(rng, conversation_lengths(rng, count), 50)
    setting = PolicySetting(policy, step_time=tile(*LLAMA2_70B_TP1))
    started_at = time.thread_time()
    run_policy(requests, CONVERSATION_MEMORY, setting)
    return time.thread_time() - started_at


def decision_times(policy: str, steps: int = _STEPS) -> np.ndarray[Any, np.dtype[np.float64]]:
    """CPU milliseconds of each `start` call with about 256 running and 1,000 waiting requests.

    A completed request is replaced by a new arrival.
    """
    rng = np.random.default_rng(2)
    memory = 40_000
    chosen = build_policy(PolicySetting(policy, step_time=tile(*LLAMA2_70B_TP1)), memory)
    lengths = iter(conversation_lengths(rng, 200_000))
    ending: dict[int, list[Candidate]] = {}
    output: dict[int, int] = {}
    running = waiting = used = 0
    durations = []
    for step in range(steps):
        for done in ending.pop(step, ()):
            chosen.finish(done, step)
            running -= 1
            used -= done.prompt + output[done.id]
        while running + waiting < _RUNNING + _WAITING:
            prompt, tokens = next(lengths)
            fresh = Candidate(len(output), float(step), prompt, tokens)
            output[fresh.id] = tokens
            chosen.arrive(fresh)
            waiting += 1
        if used + running > memory:
            for cleared in chosen.evict(step, used + running - memory):
                end = next(ends for ends, held in ending.items() if cleared in held)
                ending[end].remove(cleared)
                used -= cleared.prompt + step - (end - output[cleared.id])
                running -= 1
                waiting += 1
        started_at = time.thread_time()
        started = chosen.start(step)
        durations.append((time.thread_time() - started_at) * 1e3)
        for candidate in started:
            ending.setdefault(step + output[candidate.id], []).append(candidate)
            used += candidate.prompt
        running += len(started)
        waiting -= len(started)
        used += running
    # The first step fills an empty pool with hundreds of starts; it is not typical.
    return np.array(durations[1:])


def streamed(count: int) -> Iterator[RoundArrival]:
    """Yields `count` requests in order of arrival, drawn in chunks."""
    rng = np.random.default_rng(3)
    offset = 0.0
    for first in range(0, count, _CHUNK):
        requests = poisson_arrivals(rng, conversation_lengths(rng, min(_CHUNK, count - first)), _STEADY_RATE)
        for arrival in sorted_arrivals(requests):
            candidate = Candidate(
                first + arrival.candidate.id,
                offset + arrival.candidate.arrival,
                arrival.candidate.prompt,
                arrival.candidate.predicted,
            )
            yield RoundArrival(candidate, arrival.output_tokens)
        offset += requests[-1].arrival


def stream_run(count: int) -> dict[str, float]:
    """Runs MC-SF on `count` streamed requests in this process and reads the peak memory of the process."""
    step_time = tile(*LLAMA2_70B_TP1)
    policy = build_policy(PolicySetting("mc-sf", step_time=step_time), CONVERSATION_MEMORY)
    started_at = time.thread_time()
    totals = simulate(
        streamed(count),
        memory=CONVERSATION_MEMORY,
        policy=policy,
        step_time=step_time,
        on_finish=lambda *_: None,
    )
    return {
        "requests": totals.finished,
        "cpu_seconds": time.thread_time() - started_at,
        "mean_latency": totals.total_latency / totals.finished,
        "peak_mib": _peak_mib(),
    }


def _peak_mib() -> float:
    """Peak resident memory from /proc; `getrusage` would include the parent of the fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _in_own_process(count: int) -> Any:
    command = [
        sys.executable,
        "-m",
        "benchmark_control_plane.round_model.scheduling_cost",
        "--stream",
        str(count),
    ]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--long", action="store_true", help="add streamed runs of 100,000 and 1,000,000 requests"
    )
    parser.add_argument("--requests", type=int, default=10_000, help="of the whole run")
    parser.add_argument("--steps", type=int, default=_STEPS, help="decisions of each policy that are timed")
    parser.add_argument("--stream", type=int, help="only run this number of streamed requests")
    options = parser.parse_args(arguments)
    if options.stream is not None:
        print(json.dumps(stream_run(options.stream)))
        return 0
    report: dict[str, Any] = {
        f"mc_sf_{options.requests}_requests_cpu_seconds": min(
            whole_run("mc-sf", options.requests) for _ in range(3)
        ),
        "decision_ms_at_256_running_1000_waiting": {},
    }
    for policy in _DECIDING:
        durations = decision_times(policy, options.steps)
        quantiles = {"median": 50.0, "p99": 99.0, "max": 100.0}
        report["decision_ms_at_256_running_1000_waiting"][policy] = {
            name: round(float(np.percentile(durations, level)), 4) for name, level in quantiles.items()
        }
    if options.long:
        report["streamed"] = [_in_own_process(count) for count in (100_000, 1_000_000)]
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
