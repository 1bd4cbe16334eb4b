"""Defines the types of results.json, which writer and readers share, and validates content against them.

Shares (attainment, rates, targets) are in 0..1; `load` is a multiple of the experiment's reference rate. A
figure with an interval is `[value, low, high]`. A value that was not measured is null or absent, never
zero.
"""

import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import (
    Any,
    NotRequired,
    TypedDict,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from benchmark_control_plane.common.command_line import BadInput

FORMAT = 1
OUTCOMES = ("MET", "LATE", "REJECTED", "EVICTED", "ABORTED", "FAILED")
METRICS = ("ttft_ms", "tpot_ms", "tbt_ms", "e2e_ms")

Figure = list[float | None]
"""`[value, low, high]`; the bounds are null without enough values for an interval."""


class ExperimentInfo(TypedDict):
    """Name, question and YAML text of the experiment."""

    name: str
    question: str
    yaml: str


class Environment(TypedDict):
    """Machine and software that an experiment ran on."""

    python: str
    platform: str
    cpu: str
    cores: int
    gpu: NotRequired[str]
    versions: dict[str, str]
    commit: str | None


class SystemInfo(TypedDict):
    """`kind` is tandem, ablation, baseline or what-if."""

    name: str
    description: str
    kind: str


class Lateness(TypedDict):
    """Milliseconds between the scheduled and the actual send time."""

    p50: float | None
    p99: float | None
    max: float | None


class LossRates(TypedDict):
    """Shares of the offered requests that were lost, by cause."""

    reject: float
    evict: float
    abort: float
    fail: float


class Fairness(TypedDict):
    """Jain's index of attainment over tenants or classes, and the gap from highest to lowest priority."""

    jain: float | None
    priority_gap: float | None


class Memory(TypedDict):
    """One value per owner for each of `times_s`; a constant quota may be one number."""

    unit: NotRequired[str]
    times_s: list[float]
    by_owner: dict[str, list[float]]
    quota_by_owner: dict[str, float | list[float]]


class EngineCounters(TypedDict):
    """Counters of the engine: `preemptions` and `recompute_tokens` are numbers, the others shares.

    `device_busy` is the busy time of a simulated device; older results and real engines lack it.
    """

    preemptions: float | None
    recompute_tokens: float | None
    overflow: float | None
    cache_hit: float | None
    memory_use: NotRequired[float | None]
    device_busy: NotRequired[float | None]


class HindsightBound(TypedDict):
    """Attainment that no schedule exceeds, and that of one that knows arrivals, lengths and step times."""

    attainment: float
    feasible: float


class RunFigures(TypedDict):
    """One system under one load with one seed.

    Percentiles and `tokens_per_s` are of delivered requests; `delivered` is their share of each class. Older
    results lack the latter two. `other_cores` is what processes besides the load generator and the servers
    that the experiment started used of the machine, on average over the run. `work_ms` is the CPU time of a
    fixed piece of work just before the run: it grows where other guests of the host slow the machine down.
    `busy_work_ms` is its median during the run, when the servers slow it down, too.
    """

    system: str
    load: float
    offered_rps: float
    seed: int
    duration_s: float
    valid: bool
    why_invalid: str | None
    send_lateness_ms: Lateness
    attainment: dict[str, float | None]
    percentiles: dict[str, dict[str, dict[str, Figure | None]]]
    delivered: NotRequired[dict[str, float]]
    goodput_rps: float
    tokens_per_s: NotRequired[dict[str, float]]
    rates: LossRates
    fairness: Fairness
    memory: Memory | None
    engine: EngineCounters | None
    decisions: dict[str, int] | None
    bound: NotRequired[HindsightBound | None]
    other_cores: NotRequired[float]
    work_ms: NotRequired[float]
    busy_work_ms: NotRequired[float]


class FrontierRow(TypedDict):
    """The highest offered rate at which attainment reaches `target`; null if none does.

    `seeds` are those of `per_seed`, without seeds whose rate is not known because a run near it is not valid;
    absent in older results, whose rates are those of the experiment's seeds in their order.
    """

    system: str
    target: float
    rps: float | None
    per_seed: list[float | None]
    seeds: NotRequired[list[int]]


class Sweep(TypedDict):
    """Attainment of each variant that was tried to find the best one of a system."""

    system: str
    load: float
    attainment: dict[str, float]
    chosen: str


class Results(TypedDict):
    """Content of results.json; `capacity_rps` is 100 % load, `unloaded_ms` medians of single requests."""

    format: int
    experiment: ExperimentInfo
    partial: bool
    started: str
    environment: Environment
    systems: list[SystemInfo]
    runs: list[RunFigures]
    max_goodput_rate: list[FrontierRow]
    slos: dict[str, dict[str, float | None]]
    unloaded_ms: NotRequired[dict[str, dict[str, float | None]]]
    capacity_rps: NotRequired[float | None]
    sweeps: NotRequired[list[Sweep]]


def results_of(content: Mapping[str, Any], source: str = "results.json") -> Results:
    """`content` as Results. Raises BadInput naming the path of the first mismatch."""
    if content.get("format") != FORMAT:
        raise BadInput(f"{source}: format={content.get('format')!r}: this version reads format {FORMAT}")
    _check(content, Results, source)
    results = cast(Results, content)
    known = {system["name"] for system in results["systems"]}
    for number, run in enumerate(results["runs"]):
        if run["system"] not in known:
            raise BadInput(
                f"{source}: runs.{number}.system={run['system']!r}: not one of systems: {sorted(known)}"
            )
    return results


def _check(value: object, kind: Any, where: str) -> None:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in get_args(kind):
            return
        options = [option for option in get_args(kind) if option is not NoneType]
        # The only union of two types is a number or a list of numbers.
        chosen = next((o for o in options if (get_origin(o) is list) == isinstance(value, list)), options[0])
        _check(value, chosen, where)
    elif origin is NotRequired:
        _check(value, get_args(kind)[0], where)
    elif is_typeddict(kind):
        _check_fields(_expected(value, dict, where), kind, where)
    elif origin is dict:
        for key, item in _expected(value, dict, where).items():
            _check(item, get_args(kind)[1], f"{where}.{key}")
    elif origin is list:
        for number, item in enumerate(_expected(value, list, where)):
            _check(item, get_args(kind)[0], f"{where}.{number}")
    elif kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadInput(f"{where}={value!r}: a finite number is needed")
    else:
        _expected(value, kind, where)


def _check_fields(value: dict[str, Any], kind: Any, where: str) -> None:
    for key, field in get_type_hints(kind, include_extras=True).items():
        if key in value:
            _check(value[key], field, f"{where}.{key}")
        elif get_origin(field) is not NotRequired:
            raise BadInput(f"{where}.{key}: missing; it is required")


def _expected(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadInput(f"{where}: {kind.__name__} is needed, not {type(value).__name__}")
    return value
