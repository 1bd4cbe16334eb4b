"""The demand of a workload by class and owner, and what one box of a kind serves of it.

The work of a request on a box is its share of the device at which queues begin to grow (`stability`), scaled
so that a box is fully used at its capacity: the rate of the parts of the demand that it serves, in the
proportions of the demand, at which every class keeps its objectives. That rate is stated, or simulated.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random

from benchmark_control_plane.capacity.box_counts import OfferedKind
from benchmark_control_plane.capacity.device_model import DeviceModel
from benchmark_control_plane.capacity.search import Plan, RateSearch, Say, Simulated
from benchmark_control_plane.capacity.stability import stability
from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge import analysis
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.config import Config
from controlplane.config.fleet_file import BoxKind


def part_name(request: PlannedRequest) -> str:
    """The part of the demand that a request belongs to: its class, and the owner that serves it."""
    return f"{request.service_class}/{request.kind.owner.value}"


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests per second by part, requests to take means from, and the workload at any rate.

    `most` is the number of requests that there are, None for any.
    """

    rates: Mapping[str, float]
    sample: Sequence[PlannedRequest]
    plan: Plan
    most: int | None
    seed: int

    def part(self, rates: Mapping[str, float]) -> Plan:
        """The part of the workload in which the parts of the demand have the proportions of `rates`.

        Requests are left out at random, independently of each other, as a router spreads them. A stage of a
        retrieval whose earlier stage is left out arrives with that stage. The plan raises BadInput if a log
        has too few requests to leave out as many.
        """
        shares = {name: rates.get(name, 0.0) / rate for name, rate in self.rates.items()}
        most = max(shares.values())
        keep = {name: share / most for name, share in shares.items()}
        drawn_from = sum(self.rates.values()) / sum(keep[name] * rate for name, rate in self.rates.items())

        def plan(rate: float, warmup: float, measured: float) -> list[PlannedRequest]:
            needed = ceil(rate * drawn_from * (warmup + measured))
            if self.most is not None and needed > self.most:
                raise BadInput(
                    f"--requests: a part of the log with so many is drawn from {needed:,} requests, and the "
                    f"log has {self.most:,}; lower it"
                )
            kept = {
                request.id: request
                for request in self.plan(rate * drawn_from, warmup, measured)
                if Random(f"{self.seed} {request.id}").random() < keep[part_name(request)]
            }
            return [
                request if request.after is None or request.after in kept
                else replace(request, after=None, stage=None)
                for request in kept.values()
            ]  # fmt: skip

        return plan


def demand_of(plan: Plan, rate: float, *, sample: int, most: int | None, seed: int) -> Demand:
    """The demand of a workload at `rate` requests per second, from a sample of so many requests."""
    requests = plan(rate, 0.0, sample / rate)
    counts = Counter(part_name(request) for request in requests)
    rates = {name: rate * count / len(requests) for name, count in sorted(counts.items())}
    return Demand(rates, requests, plan, most, seed)


def serves(config: Config, part: str) -> bool:
    """Whether a box of this configuration has a model for the part."""
    models = config.models
    return bool(models.embeddings) if part.endswith("/embedding") else models.chat is not None


@dataclass(frozen=True, slots=True)
class MeasuredKind:
    """A kind of box with what one box serves.

    Attributes:
        offered: the kind as the integer program takes it; without work if a box serves nothing in time.
        gpus: GPUs of a box.
        capacity: requests per second of a box, of the parts that it serves in their proportions; None if it
            does not keep the objectives at any rate.
        limit: what limits that rate.
        simulated: runs a box at other loads; None if the capacity is stated.
    """

    offered: OfferedKind
    gpus: int
    capacity: float | None
    limit: str
    simulated: Simulated | None

    def attainment(self, demand: Demand, rates: Mapping[str, float], boxes: int) -> dict[str, float]:
        """Attainment by class on a box that gets its part of the rates, simulated; empty if not simulated."""
        total = sum(rates.values()) / boxes
        if self.simulated is None or total == 0:
            return {}
        return analysis.class_attainments(replace(self.simulated, plan=demand.part(rates)).at(total))


def measured_kind(
    kind: OfferedKind,
    stated: BoxKind,
    model: DeviceModel,
    demand: Demand,
    simulated: Simulated,
    *,
    target: float,
    steps: int,
    say: Say,
) -> MeasuredKind:
    """Measures one box of a kind; `kind.work` names the parts of the demand that it serves.

    `simulated` has sections and objectives of the box; `target` and `steps` are attainment and bisections.
    """
    rates = {part: rate for part, rate in demand.rates.items() if part in kind.work}
    if not rates:
        return MeasuredKind(kind, stated.gpus, None, "it serves no part of the demand", None)
    requests = {part: [r for r in demand.sample if part_name(r) == part] for part in rates}
    sample = [request for group in requests.values() for request in group]
    device, block = model.section, model.block_tokens
    bound = stability(sample, device, block=block, target=target)
    if stated.capacity is None:
        simulated = replace(simulated, plan=demand.part(rates))
        found = RateSearch(simulated, target, say).run(bound, steps=steps)[0]
        capacity, limit = found.rate, found.limit
    else:
        capacity, limit = stated.capacity, f"stated; by the model of the device {bound.binding}"
    if capacity is None:
        return MeasuredKind(replace(kind, work={}), stated.gpus, None, limit, None)
    work = {
        part: 1 / stability(group, device, block=block, target=target).overloaded_above
        for part, group in requests.items()
    }
    busy = capacity * sum(rate * work[part] for part, rate in rates.items()) / sum(rates.values())
    return MeasuredKind(
        replace(kind, work={part: each / busy for part, each in work.items()}),
        stated.gpus,
        capacity,
        limit,
        simulated if stated.capacity is None else None,
    )
