"""Validates the simulator against queueing theory: mean waits of M/D/1 and M/M/c, and Little's law.

    python -m benchmark_control_plane.simulator.queueing_check

With steps of constant length and no memory limit, the `max_running` slots act as servers. The formulas give
the expected wait; the Kiefer-Wolfowitz recursion gives the exact waits of the drawn sample, which serve as a
control variate: the sample mean deviates from the formula, but the simulator must not deviate from the
sample. The unit of time is the mean service time.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial

import numpy as np

from backends.cost_models.step_time import affine, llm_only
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import (
    SimulatedRequest,
    SimulationResult,
    arrival_times,
    simulate,
)
from controlplane.core.memory_ledger import Floats

_NANO = 1e-9
_SYSTEMS = ((1, 0.5, None), (1, 0.8, None), (1, 0.7, 50), (2, 0.8, 50), (4, 0.75, 100))
"""(servers, utilisation, steps per mean service or None for M/D/1). A slot is assigned only between steps, so
a request that finds one free waits half a step on average: more steps approximate the continuous model
better."""
_UNLIMITED_WAIT = {
    "admission": {"max_waiting": 10_000_000, "max_wait_ms": 86_400_000},
    # The formulae hold for first come, first served; the default order knows the lengths.
    "scheduling": {"ordering": "fcfs"},
}


def mmc_wait(servers: int, load: float) -> float:
    """Mean waiting time in an M/M/c queue at utilisation `load`, in mean service times (Erlang C)."""
    offered = servers * load
    tail = offered**servers / factorial(servers) / (1 - load)
    all_busy = tail / (sum(offered**k / factorial(k) for k in range(servers)) + tail)
    return all_busy / (servers * (1 - load))


def md1_wait(load: float) -> float:
    """Mean waiting time in an M/D/1 queue, in service times (Pollaczek-Khinchine)."""
    return load / (2 * (1 - load))


def exact_waits(gaps: Floats, services: Floats, servers: int) -> Floats:
    """FCFS waiting times by the Kiefer-Wolfowitz recursion; all arrays are [replications, customers]."""
    replications, customers = gaps.shape
    work = np.zeros((replications, servers))
    waits = np.empty_like(gaps)
    for n in range(customers):
        work = np.maximum(work - gaps[:, n : n + 1], 0.0)
        waits[:, n] = work[:, 0]
        work[:, 0] += services[:, n]
        work.sort(axis=1)
    return waits


@dataclass(frozen=True, slots=True)
class QueueingComparison:
    """Mean waits, in mean service times.

    Attributes:
        model: queueing model.
        formula: wait by the formula.
        simulated: mean wait in the simulation.
        sample: exact mean wait of the drawn sample.
        present: sampled mean number in the system.
        little: arrival rate times mean time in the system.
    """

    model: str
    formula: float
    simulated: float
    sample: float
    present: float
    little: float

    @property
    def estimate(self) -> float:
        """The simulator's expected wait, estimated with the exact wait of the sample as control variate."""
        return self.formula + self.simulated - self.sample

    @property
    def error(self) -> float:
        """Relative error of the estimate."""
        return self.estimate / self.formula - 1


def compare(
    servers: int, load: float, customers: int, *, seed: int, steps_per_service: int | None = None
) -> QueueingComparison:
    """Simulates one queue and compares it with its formula.

    Without `steps_per_service` the queue is M/D/1 (one step per request); otherwise M/M/c, with exponential
    service times rounded to whole steps of 1 / `steps_per_service`.
    """
    rng = np.random.default_rng(seed)
    at = arrival_times(rng, servers * load, customers)
    services = np.ones(customers)
    step, tokens = 1.0, [1] * customers
    if steps_per_service is not None:
        step = 1 / steps_per_service
        services = rng.exponential(1.0, customers)
        tokens = [max(1, round(float(s) / step)) for s in services]
    result = _simulated(at, tokens, step, servers)
    gaps = np.diff(at, prepend=0.0)
    sojourns = np.array([((r.finished or 0) - r.arrival) * _NANO for r in result.records])
    waits = sojourns - step * np.array(tokens)
    # From an empty to an empty system, so that no sojourn time is truncated.
    span = max(r.finished or 0 for r in result.records) * _NANO
    present = [count for _, count in result.presence]
    return QueueingComparison(
        model="M/D/1" if steps_per_service is None else f"M/M/{servers}",
        formula=md1_wait(load) if steps_per_service is None else mmc_wait(servers, load),
        simulated=float(waits.mean()),
        sample=float(exact_waits(gaps[None], services[None], servers).mean()),
        present=float(np.mean(present)),
        little=customers / span * float(sojourns.mean()),
    )


def _simulated(at: Sequence[float], tokens: Sequence[int], step: float, servers: int) -> SimulationResult:
    offered = [
        SimulatedRequest(time, prompt_tokens=1, output_tokens=count)
        for time, count in zip(at, tokens, strict=True)
    ]
    machine = Machine(llm_only(affine(step, 0, 0, 0)), max_running=servers)
    return simulate(offered, machine, _UNLIMITED_WAIT, sample_every=0.2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="queueing", description=__doc__)
    parser.add_argument("--customers", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rows = []
    print(
        "model   load  formula  estimate   error  simulated  its sample  in system  rate x time",
        file=sys.stderr,
    )
    for servers, load, steps in _SYSTEMS:
        customers = options.customers if steps is None else options.customers // 4
        row = compare(servers, load, customers, seed=options.seed, steps_per_service=steps)
        rows.append(
            {"model": row.model, "load": load, "customers": customers, "formula": row.formula,
             "estimate": row.estimate, "error": row.error, "simulated": row.simulated, "sample": row.sample,
             "present": row.present, "little": row.little}
        )  # fmt: skip
        print(
            f"{row.model:6}  {load:4.2f}  {row.formula:7.4f}  {row.estimate:8.4f}  {row.error:+.2%}"
            f"  {row.simulated:9.4f}  {row.sample:10.4f}  {row.present:9.4f}  {row.little:11.4f}",
            file=sys.stderr,
        )
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
