"""What is the question, and what is run to answer it? One YAML file, parsed strictly.

What a section alone cannot tell is checked here: names that must exist elsewhere in the file, systems that
need models or a device, and Tandem's own sections, by the parser of the server itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from benchmark_control_plane.common.arguments import BadInput
from benchmark_control_plane.judge.experiment_schema import (
    CapacitySection,
    ClassSection,
    Endpoints,
    Live,
    Positive,
    SimulatedDeviceSection,
    StreamSection,
    SystemSection,
    Times,
    WindowSection,
)
from controlplane.config import ConfigError, parse
from controlplane.config.fields import STRICT, Fraction, Name
from controlplane.config.loader import parse_as, read_yaml

_ANY_OBJECTIVE_MS = 1_000.0
_QUICK_LOADS, _QUICK_MEASURED_S = 2, 6.0


@section(frozen=True, config=STRICT)
class FrontierTargets:
    """`steps` more runs a seed halve the interval in which attainment crosses each target."""

    targets: tuple[Fraction, ...] = (0.9, 0.6)
    steps: Annotated[int, Field(ge=0, le=20)] = 0


@section(frozen=True, config=STRICT)
class ExperimentPlan:
    """`reference` names the system on which unloaded latencies and capacity are measured, by default the
    first; `together` systems are up at once and take turns; `slo_scale` multiplies every objective."""

    name: Name
    question: Name
    classes: Mapping[Name, ClassSection]
    streams: Mapping[Name, StreamSection]
    systems: tuple[SystemSection, ...]
    loads: Annotated[tuple[Positive, ...], Field(min_length=1)] = (0.5, 1.0, 1.5)
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    window: WindowSection = WindowSection()
    capacity: CapacitySection = CapacitySection()
    frontier: FrontierTargets = FrontierTargets()
    reference: Name | None = None
    slo_scale: Times = 1.0
    together: Annotated[int, Field(ge=1, le=8)] = 2
    live: Live | None = None
    device: SimulatedDeviceSection | None = None

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(problem)

    @property
    def reference_system(self) -> SystemSection:
        return next((s for s in self.systems if s.name == self.reference), self.systems[0])

    def device_of(self, system: SystemSection) -> SimulatedDeviceSection:
        return system.device or self.device or SimulatedDeviceSection()


@dataclass(frozen=True, slots=True)
class Experiment:
    plan: ExperimentPlan
    text: str
    data: Path = field(default_factory=lambda: Path("..") / "shared" / "data")


def read_experiment(path: Path, data: Path) -> Experiment:
    """Raises BadInput with one line for each mistake in the file."""
    try:
        content, text = _read_extended(path)
        plan = parse_as(ExperimentPlan, content, source=str(path))
    except ConfigError as error:
        raise BadInput(str(error)) from error
    return Experiment(plan, text, data)


def _read_extended(path: Path) -> tuple[object, str]:
    """A file that `extends` another, beside it, states what differs; lists it states replace the other's,
    where a system's name alone stands for the other's system, and a stream with a kind is all its own. With
    the text of both."""
    content = read_yaml(path)
    text = path.read_text(encoding="utf-8")
    if not isinstance(content, dict) or "extends" not in content:
        return content, text
    below = path.parent / str(content.pop("extends"))
    base = read_yaml(below)
    if not isinstance(base, dict) or "extends" in base:
        raise ConfigError(f"{path}: extends: the other file is an experiment that extends none")
    if isinstance(systems := content.get("systems"), list):
        content["systems"] = [_resolve_system(base, system, path) for system in systems]
    if isinstance(streams := content.get("streams"), dict):
        own = {name for name, stream in streams.items() if isinstance(stream, dict) and "kind" in stream}
        base["streams"] = {name: s for name, s in base.get("streams", {}).items() if name not in own}
    return merge(base, content), f"{text}\n# --- {below.name}\n\n{below.read_text(encoding='utf-8')}"


def _resolve_system(base: Mapping[str, Any], system: object, path: Path) -> object:
    if not isinstance(system, str):
        return system
    known = {one["name"]: one for one in base.get("systems", ()) if isinstance(one, dict) and "name" in one}
    if system not in known:
        raise ConfigError(
            f"{path}: systems: {system!r} is not in the file this one extends ({', '.join(known)}); "
            "name one of those or state the system"
        )
    return known[system]


def quick(plan: ExperimentPlan) -> ExperimentPlan:
    """The same question in about a minute: one seed, the outermost loads, short windows, the first tandem
    and the first baseline, no variants."""
    kept = [next((s for s in plan.systems if s.kind == kind), None) for kind in ("tandem", "baseline")]
    systems = [first_variant(system) for system in kept if system is not None] or [
        first_variant(plan.systems[0])
    ]
    loads = tuple(dict.fromkeys((plan.loads[0], plan.loads[-1])))[:_QUICK_LOADS]
    window = replace(plan.window, measured_s=min(plan.window.measured_s, _QUICK_MEASURED_S))
    names = [system.name for system in systems]
    return replace(
        plan,
        systems=tuple(systems),
        loads=loads,
        seeds=plan.seeds[:1],
        window=window,
        frontier=replace(plan.frontier, steps=0),
        reference=plan.reference if plan.reference in names else None,
    )


def first_variant(system: SystemSection) -> SystemSection:
    if system.variants:
        return replace(
            system, split=next(iter(system.variants.values())), variants={}, loads=None, seeds=None
        )
    return replace(system, loads=None, seeds=None)


def classes_section(plan: ExperimentPlan, objectives: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The classes as the server's YAML has them. `objectives` holds, by class, ttft_ms, tpot_ms, e2e_ms."""
    has_default = any(promise.default for promise in plan.classes.values())
    return {
        name: {
            "priority": promise.priority,
            "sheddable": promise.sheddable,
            "default": promise.default or (not has_default and number == 0),
            **objectives.get(name, {}),
        }
        for number, (name, promise) in enumerate(plan.classes.items())
    }


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins; mappings in both are merged likewise."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[key] = merge(below, value)
        else:
            result[key] = value
    return result


def _problems(plan: ExperimentPlan) -> Iterator[str]:
    classes = ", ".join(sorted(plan.classes))
    for name, stream in plan.streams.items():
        for one in (stream.service_class, stream.embed_class):
            if one is not None and one not in plan.classes:
                yield f"streams.{name}: class {one!r} is not in classes ({classes})"
    names = [system.name for system in plan.systems]
    if not names:
        yield "systems: none is given; state at least one"
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"systems: {twice[0]!r} is given twice; rename one"
    if plan.reference is not None and plan.reference not in names:
        yield f"reference={plan.reference!r}: no such system; choose one of {', '.join(names)}"
    for system in plan.systems:
        yield from _system_problems(plan, system)


def _missing_endpoints(plan: ExperimentPlan, system: str, endpoints: Endpoints) -> Iterator[str]:
    asked = {"chat": ("generate", "retrieval"), "embeddings": ("embed", "retrieval")}
    for name, kinds in asked.items():
        if getattr(endpoints, name) is not None:
            continue
        for stream, stated in plan.streams.items():
            if stated.kind in kinds:
                yield f"system {system!r}: endpoints.{name}: missing; stream {stream!r} needs it"


def _system_problems(plan: ExperimentPlan, system: SystemSection) -> Iterator[str]:
    for stream in system.arrivals:
        if stream not in plan.streams:
            yield f"system {system.name!r}: arrivals of {stream!r}, which is not in streams"
    if strange := sorted(set(system.seeds or ()) - set(plan.seeds)):
        yield f"system {system.name!r}: seed {strange[0]} is not among the experiment's; add it there"
    if system.endpoints is not None:
        yield from _missing_endpoints(plan, system.name, system.endpoints)
    if (system.tandem is not None or system.split or system.variants) and plan.live is None:
        yield f"system {system.name!r} starts servers; give the models under live"
    sections = system.tandem if system.tandem is not None else system.simulated
    if sections is not None:
        any_objective = {name: {"ttft_ms": _ANY_OBJECTIVE_MS} for name in plan.classes}
        content = {"models": {"chat": {"model": "any"}}, "classes": classes_section(plan, any_objective)}
        try:
            config = parse(merge(content, sections), source=f"system {system.name!r}")
        except ConfigError as error:
            yield str(error)
            return
        if system.simulated is not None and config.scheduling.engine is not None:
            yield (
                f"system {system.name!r}: scheduling.engine: the simulated engine orders nothing, it serves "
                "first come; leave it out"
            )
