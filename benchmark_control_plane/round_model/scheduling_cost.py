"""What do the step policies cost? Whole runs, one decision at 1,000 waiting, memory over the trace.

`python -m benchmark_control_plane.round_model.scheduling_cost [--long]` prints JSON; --long adds the run of a
million requests, streamed, beside one of a tenth. CPU time of this thread, so neighbours count little.
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
from benchmark_control_plane.round_model.policies.interface import Candidate
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
"""Requests a second that the 70B model keeps up with, so the queue does not grow with the trace."""


def whole_run(policy: str, count: int) -> float:
    """CPU seconds for `count` requests at 50 a second."""
    rng = np.random.default_rng(1)
    requests = poisson_arrivals(rng, conversation_lengths(rng, count), 50)
    setting = PolicySetting(policy, step_time=tile(*LLAMA2_70B_TP1))
    begun = time.thread_time()
    run_policy(requests, CONVERSATION_MEMORY, setting)
    return time.thread_time() - begun


def decision_times(policy: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Milliseconds of `start` in steps with about 256 running and 1,000 waiting; whoever ends is replaced."""
    rng = np.random.default_rng(2)
    memory = 40_000
    chosen = build_policy(PolicySetting(policy, step_time=tile(*LLAMA2_70B_TP1)), memory)
    lengths = iter(conversation_lengths(rng, 200_000))
    ending: dict[int, list[Candidate]] = {}
    output: dict[int, int] = {}
    running = waiting = used = 0
    taken = []
    for step in range(_STEPS):
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
            for cleared in chosen.clear(step, used + running - memory):
                gone = next(ends for ends, held in ending.items() if cleared in held)
                ending[gone].remove(cleared)
                used -= cleared.prompt + step - (gone - output[cleared.id])
                running -= 1
                waiting += 1
        begun = time.thread_time()
        started = chosen.start(step)
        taken.append((time.thread_time() - begun) * 1e3)
        for one in started:
            ending.setdefault(step + output[one.id], []).append(one)
            used += one.prompt
        running += len(started)
        waiting -= len(started)
        used += running
    # The first step fills an empty pool: hundreds of starts, not a decision.
    return np.array(taken[1:])


def streamed(count: int) -> Iterator[RoundArrival]:
    rng = np.random.default_rng(3)
    offset = 0.0
    for first in range(0, count, _CHUNK):
        requests = poisson_arrivals(rng, conversation_lengths(rng, min(_CHUNK, count - first)), _STEADY_RATE)
        for one in sorted_arrivals(requests):
            candidate = Candidate(
                first + one.candidate.id,
                offset + one.candidate.arrival,
                one.candidate.prompt,
                one.candidate.predicted,
            )
            yield RoundArrival(candidate, one.output_tokens)
        offset += requests[-1].arrival


def stream_run(count: int) -> dict[str, float]:
    """In this process, whose peak memory is read afterwards."""
    step_time = tile(*LLAMA2_70B_TP1)
    policy = build_policy(PolicySetting("mc-sf", step_time=step_time), CONVERSATION_MEMORY)
    begun = time.thread_time()
    totals = simulate(
        streamed(count),
        memory=CONVERSATION_MEMORY,
        policy=policy,
        step_time=step_time,
        on_finish=lambda *_: None,
    )
    return {
        "requests": totals.finished,
        "cpu_seconds": time.thread_time() - begun,
        "mean_latency": totals.total_latency / totals.finished,
        "peak_mib": _peak_mib(),
    }


def _peak_mib() -> float:
    """From Linux's own count: `getrusage` also remembers the parent that this process was forked from."""
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
    parser.add_argument("--long", action="store_true", help="add the run of a million requests")
    parser.add_argument("--stream", type=int, help="only one streamed run of so many requests")
    options = parser.parse_args(arguments)
    if options.stream is not None:
        print(json.dumps(stream_run(options.stream)))
        return 0
    report: dict[str, Any] = {
        "mc_sf_10000_requests_cpu_seconds": min(whole_run("mc-sf", 10_000) for _ in range(3)),
        "decision_ms_at_256_running_1000_waiting": {},
    }
    for policy in _DECIDING:
        taken = decision_times(policy)
        quantiles = {"median": 50.0, "p99": 99.0, "max": 100.0}
        report["decision_ms_at_256_running_1000_waiting"][policy] = {
            name: round(float(np.percentile(taken, level)), 4) for name, level in quantiles.items()
        }
    if options.long:
        report["streamed"] = [_in_own_process(count) for count in (100_000, 1_000_000)]
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
