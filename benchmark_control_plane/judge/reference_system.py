"""Measures the reference system before all runs: unloaded latencies (hence objectives) and capacity."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge import analysis
from benchmark_control_plane.judge.experiment_file import Experiment, ExperimentPlan
from benchmark_control_plane.judge.experiment_schema import Arrivals
from benchmark_control_plane.judge.measurement_stages import Stage, probe, requests_of
from benchmark_control_plane.judge.memory_sampler import Read
from benchmark_control_plane.judge.open_loop_client import Clock, RunResult, Target, closed_loop
from benchmark_control_plane.judge.records import RequestRecord
from benchmark_control_plane.judge.system_schema import SystemSection
from benchmark_control_plane.judge.systems import Objectives
from controlplane.core.request import Kind

_UNLOADED_REQUESTS = 12
"""Requests per class, sent one at a time, that give the unloaded latencies."""
_ROUNDS = 3
"""Measurements of real servers, so that work of other processes during one of them changes nothing."""
_OBJECTIVES = ("ttft_ms", "tpot_ms", "e2e_ms", "gap_ms")
_SATURATING_RPS = (500.0, 4_000.0)
"""Rates at which requests are drawn for a saturation probe; the second if the first runs out of requests."""
_RAMP_UP_SHARE = 0.25
"""Share of a saturation probe that is discarded as ramp-up."""


def unloaded(experiment: Experiment, stage: Stage, system: SystemSection) -> dict[str, dict[str, float]]:
    """Latencies in ms by class and metric, of requests sent one at a time: the least median of the rounds.

    Whatever else runs on the machine only adds to a latency. A simulated system needs one round.
    """
    drawn = requests_of(experiment, system, 50.0, seed=0, measured=60.0)
    chosen = [
        request
        for name in experiment.plan.classes
        for request in [r for r in drawn if r.service_class == name][: _UNLOADED_REQUESTS + 1]
    ]
    # A request's text follows from its id: no round finds the prompts of another in a prefix cache.
    rounds = [chosen] + [
        [replace(request, id=f"round-{number}-{request.id}") for request in chosen]
        for number in range(1, _rounds(stage))
    ]

    async def act(target: Target, clock: Clock, read: Read | None) -> list[Sequence[RequestRecord]]:
        await probe(target, drawn, clock, system.name)
        return [
            (await closed_loop(target, plan, clients=1, seconds=float("inf"), clock=clock)).records
            for plan in rounds
        ]

    found: dict[str, dict[str, float]] = {}
    for records in stage.act(act):
        for name, group in analysis.group_by(records, lambda r: r.planned.service_class).items():
            least = found.setdefault(name, {})
            for metric, value in _median_latencies(group).items():
                least[metric] = min(value, least.get(metric, value))
    return found


def _rounds(stage: Stage) -> int:
    return _ROUNDS if stage.shares_machine else 1


def _median_latencies(group: Sequence[RequestRecord]) -> dict[str, float]:
    """Medians in ms by metric of one class; its first request is warm-up."""
    latencies = {m: [v for r in group[1:] if (v := getattr(r, m)) is not None] for m in _OBJECTIVES}
    found = {metric: median(values) for metric, values in latencies.items() if values}
    if any(r.planned.kind is Kind.EMBED for r in group) and "e2e_ms" in found:
        found.setdefault("ttft_ms", found["e2e_ms"])
    return found


def objectives_from(plan: ExperimentPlan, unloaded_ms: Objectives) -> dict[str, dict[str, float]]:
    """Objectives of each class in ms; raises BadInput for a multiple of a latency that was not measured."""
    found: dict[str, dict[str, float]] = {}
    for name, class_section in plan.classes.items():
        found[name] = {}
        for metric in _OBJECTIVES:
            part = metric.removesuffix("_ms")
            times = getattr(class_section.times_unloaded, part)
            if (stated := getattr(class_section, metric)) is not None:
                found[name][metric] = plan.slo_scale * stated
            elif times is not None:
                if metric not in unloaded_ms.get(name, {}):
                    raise BadInput(
                        f"classes.{name}.times_unloaded.{part}: no request of this class has a {part} on "
                        "the unloaded system; drop it"
                    )
                found[name][metric] = plan.slo_scale * times * unloaded_ms[name][metric]
    return found


def saturation(experiment: Experiment, stage: Stage, system: SystemSection) -> float:
    """Closed-loop throughput in requests per second, the median of the rounds.

    Raises BadInput if it cannot be measured.
    """
    return median(_saturation(experiment, stage, system, seed) for seed in range(1, 1 + _rounds(stage)))


def _saturation(experiment: Experiment, stage: Stage, system: SystemSection, seed: int) -> float:
    for rate in _SATURATING_RPS:
        result, is_whole = _saturated(experiment, stage, system, rate, seed)
        if is_whole:
            break
    else:
        raise BadInput(
            f"system {system.name!r} finished all {len(result.records)} requests before the probe's "
            f"{experiment.plan.capacity.probe_s:g} s ended; state capacity.rps, or lower capacity.clients"
        )
    start, end = _RAMP_UP_SHARE * experiment.plan.capacity.probe_s, experiment.plan.capacity.probe_s
    answered = [r for r in result.records if r.is_delivered and r.last is not None and start <= r.last < end]
    if not answered:
        raise BadInput(
            f"system {system.name!r} completed no request within {end:g} s; lengthen capacity.probe_s"
        )
    return len(answered) / (end - start)


def _saturated(
    experiment: Experiment, stage: Stage, system: SystemSection, rate: float, seed: int
) -> tuple[RunResult, bool]:
    """Result of a saturation probe, and whether requests remained to its end."""
    capacity = experiment.plan.capacity
    # The probe takes the first requests only, where bursts would make another mix than that of the streams.
    steady = replace(system, arrivals=dict.fromkeys(experiment.plan.streams, Arrivals()))
    drawn = requests_of(experiment, steady, rate, seed=seed, measured=capacity.probe_s)

    async def act(target: Target, clock: Clock, read: Read | None) -> RunResult:
        await probe(target, drawn, clock, system.name)
        return await closed_loop(
            target, drawn, clients=capacity.clients, seconds=capacity.probe_s, clock=clock
        )  # fmt: skip

    result = stage.act(act)
    return result, len(result.records) < len(drawn)
