"""Does the simulator wait as long as queueing theory says?

    python -m benchmark_control_plane.simulator.queueing_check

With steps of constant length and no memory limit, `max_running` slots are servers. Beside the formulas stands
the exact wait of the very sample (Kiefer and Wolfowitz's recursion): a sample of n waits strays from its
formula, but the simulator must not stray from its sample. Service times are measured in mean services.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial

import numpy as np
import numpy.typing as npt

from backends.cost_models.step_time import affine, llm_only
from benchmark_control_plane.simulator.simulation import (
    Machine,
    SimulatedRequest,
    SimulationResult,
    arrival_times,
    simulate,
)

Floats = npt.NDArray[np.float64]

_NANO = 1e-9
_SYSTEMS = ((1, 0.5, None), (1, 0.8, None), (1, 0.7, 50), (2, 0.8, 50), (4, 0.75, 100))
"""(servers, load, steps per service or None for M/D/1). Slots free up between steps only, so whoever finds
one free waits half a step: the more steps, the nearer to the continuous model."""
_UNLIMITED_WAIT = {"admission": {"max_waiting": 10_000_000, "max_wait_ms": 86_400_000}}


def mmc_wait(servers: int, load: float) -> float:
    """Mean wait in queue of M/M/c at utilisation `load`, in mean services (Erlang C)."""
    offered = servers * load
    tail = offered**servers / factorial(servers) / (1 - load)
    all_busy = tail / (sum(offered**k / factorial(k) for k in range(servers)) + tail)
    return all_busy / (servers * (1 - load))


def md1_wait(load: float) -> float:
    """Mean wait in queue of M/D/1, in services (Pollaczek and Khinchine)."""
    return load / (2 * (1 - load))


def exact_waits(gaps: Floats, services: Floats, servers: int) -> Floats:
    """Waits in arrival order, first come first served; [replications, customers] all at once."""
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
    """Mean waits in mean services. `present` is the mean number in the system as sampled, `little` the
    arrival rate times the mean time in it."""

    model: str
    formula: float
    simulated: float
    sample: float
    present: float
    little: float

    @property
    def estimate(self) -> float:
        """Of the simulator's expected wait, with the sample's exact wait as control variate."""
        return self.formula + self.simulated - self.sample

    @property
    def error(self) -> float:
        return self.estimate / self.formula - 1


def compare(
    servers: int, load: float, customers: int, *, seed: int, steps_per_service: int | None = None
) -> QueueingComparison:
    """M/D/1 without `steps_per_service` (an answer is one step); else M/M/c with exponential services
    rounded to whole steps, so many in a mean service."""
    rng = np.random.default_rng(seed)
    at = arrival_times(rng, servers * load, customers)
    services = np.ones(customers)
    step, tokens = 1.0, [1] * customers
    if steps_per_service is not None:
        step = 1 / steps_per_service
        services = rng.exponential(1.0, customers)
        tokens = [max(1, round(float(s) / step)) for s in services]
    course = _simulated(at, tokens, step, servers)
    gaps = np.diff(at, prepend=0.0)
    sojourns = np.array([((r.finished or 0) - r.arrival) * _NANO for r in course.records])
    waits = sojourns - step * np.array(tokens)
    # From empty to empty, so that nobody's time in the system is cut off.
    span = max(r.finished or 0 for r in course.records) * _NANO
    present = [count for _, count in course.presence]
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
        one = compare(servers, load, customers, seed=options.seed, steps_per_service=steps)
        rows.append(
            {"model": one.model, "load": load, "customers": customers, "formula": one.formula,
             "estimate": one.estimate, "error": one.error, "simulated": one.simulated, "sample": one.sample,
             "present": one.present, "little": one.little}
        )  # fmt: skip
        print(
            f"{one.model:6}  {load:4.2f}  {one.formula:7.4f}  {one.estimate:8.4f}  {one.error:+.2%}"
            f"  {one.simulated:9.4f}  {one.sample:10.4f}  {one.present:9.4f}  {one.little:11.4f}",
            file=sys.stderr,
        )
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
