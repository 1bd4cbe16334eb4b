"""Reads an experiment from a YAML file and validates it as a whole.

Checks across sections happen here: names that must exist elsewhere in the file, systems that need models or a
device, and sections of Tandem's configuration, which are checked by the server's own parser.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge.experiment_schema import (
    CapacitySection,
    ExperimentClass,
    Positive,
    StreamSection,
    Times,
    WindowSection,
)
from benchmark_control_plane.judge.system_schema import Endpoints, Live, SimulatedDeviceSection, SystemSection
from benchmark_control_plane.judge.workflow_stages import WorkflowDeadlines
from controlplane.config import ConfigError, parse
from controlplane.config.active_mechanisms import unused_keys
from controlplane.config.fields import STRICT, Fraction, Name
from controlplane.config.loader import parse_as, read_yaml

EXTENDED_FILE = re.compile(r"^# --- (\S+\.ya?ml)$\n", re.MULTILINE)
"""Line between the text of a file and that of the one it extends."""
_ANY_OBJECTIVE_MS = 1_000.0
_QUICK_MEASURED_S = 6.0


@section(frozen=True, config=STRICT)
class FrontierTargets:
    """Attainment targets of the frontier search; `steps` bisection runs per seed refine each crossing."""

    targets: tuple[Fraction, ...] = (0.9, 0.6)
    steps: Annotated[int, Field(ge=0, le=20)] = 0


@section(frozen=True, config=STRICT)
class ExperimentPlan:
    """All settings of an experiment.

    Attributes:
        name: short name.
        question: question that the experiment answers; heading of the report.
        classes: service classes with their objectives.
        streams: workload streams.
        systems: systems to measure.
        loads: offered loads, as multiples of the capacity.
        seeds: seeds of the workload.
        window: warm-up, measured and drain times.
        capacity: definition of 100 % load.
        frontier: targets of the frontier search.
        reference: system on which unloaded latencies and capacity are measured; default: the first.
        slo_scale: factor on every objective.
        together: number of systems that run at the same time, measured alternately.
        live: models of systems that start servers.
        device: simulated device.
    """

    name: Name
    question: Name
    classes: Mapping[Name, ExperimentClass]
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
        """The system that `reference` names, or the first."""
        return next((s for s in self.systems if s.name == self.reference), self.systems[0])

    def device_of(self, system: SystemSection) -> SimulatedDeviceSection:
        """Simulated device of a system: its own, the experiment's, or the default."""
        return system.device or self.device or SimulatedDeviceSection()


@dataclass(frozen=True, slots=True)
class Experiment:
    """A parsed experiment, the text of its file, and the folder of public data sets."""

    plan: ExperimentPlan
    text: str
    data: Path


def read_experiment(path: Path, data: Path) -> Experiment:
    """Parses and validates an experiment; raises BadInput with one line per mistake."""
    try:
        content, text = read_extended(path)
        return Experiment(parsed(content, path), text, data)
    except ConfigError as error:
        raise BadInput(str(error)) from error


def experiment_of_text(text: str, data: Path) -> Experiment:
    """The experiment of a text as `Experiment.text` holds it: a file, then each of those it extends."""
    own, *below = EXTENDED_FILE.split(text)
    with tempfile.TemporaryDirectory() as folder:
        for name, base in zip(below[::2], below[1::2], strict=True):
            (Path(folder) / Path(name).name).write_text(base, encoding="utf-8")
        # The name of the file itself is not kept; no base has this one.
        file = Path(folder) / "experiment of the results.yaml"
        file.write_text(own, encoding="utf-8")
        return read_experiment(file, data)


def parsed(content: object, path: Path) -> ExperimentPlan:
    """Plan with this content. Raises ConfigError, whose lines begin with `path`."""
    return parse_as(ExperimentPlan, content, source=str(path))


def read_extended(path: Path, extending: tuple[str, ...] = ()) -> tuple[object, str]:
    """Content and text of a file, merged over the file in the same folder that it `extends`, and so on.

    A file states only differences. Its lists replace those of the base; a name in `systems` refers to a
    system of the base, and a stream with a `kind` replaces the stream of the base.
    """
    content = read_yaml(path)
    text = path.read_text(encoding="utf-8")
    if not isinstance(content, dict) or "extends" not in content:
        return content, text
    below = path.parent / str(content.pop("extends"))
    if below.name in (*extending, path.name):
        raise ConfigError(f"{path}: extends: {below.name} extends this file; drop one of them")
    base, base_text = read_extended(below, (*extending, path.name))
    if not isinstance(base, dict):
        raise ConfigError(f"{path}: extends: {below.name} must be an experiment")
    if isinstance(systems := content.get("systems"), list):
        content["systems"] = [_resolve_system(base, system, path) for system in systems]
    if isinstance(streams := content.get("streams"), dict):
        own = {name for name, stream in streams.items() if isinstance(stream, dict) and "kind" in stream}
        base["streams"] = {name: s for name, s in base.get("streams", {}).items() if name not in own}
    return merge(base, content), f"{text}\n# --- {below.name}\n\n{base_text}"


def _resolve_system(base: Mapping[str, Any], system: object, path: Path) -> object:
    if not isinstance(system, str):
        return system
    known = {s["name"]: s for s in base.get("systems", ()) if isinstance(s, dict) and "name" in s}
    if system not in known:
        raise ConfigError(
            f"{path}: systems: {system!r} is not in the file this one extends ({', '.join(known)}); "
            "name one of those or state the system"
        )
    return known[system]


def quick(plan: ExperimentPlan) -> ExperimentPlan:
    """A reduced plan that takes about a minute.

    One seed, the first and last load, a short window, the first tandem system and the first baseline, and no
    variants.
    """
    chosen = [next((s for s in plan.systems if s.kind == kind), None) for kind in ("tandem", "baseline")]
    systems = [first_variant(system) for system in chosen if system is not None] or [
        first_variant(plan.systems[0])
    ]
    loads = tuple(dict.fromkeys((plan.loads[0], plan.loads[-1])))
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
    """The system with its first variant only, and with the loads and seeds of the experiment."""
    if system.variants:
        return replace(
            system, split=next(iter(system.variants.values())), variants={}, loads=None, seeds=None
        )
    return replace(system, loads=None, seeds=None)


def classes_section(plan: ExperimentPlan, objectives: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """`classes` section of the server's YAML; `objectives` holds milliseconds by class and name."""
    has_default = any(class_section.default for class_section in plan.classes.values())
    return {
        name: {
            "priority": class_section.priority,
            "sheddable": class_section.sheddable,
            "default": class_section.default or (not has_default and number == 0),
            **objectives.get(name, {}),
        }
        for number, (name, class_section) in enumerate(plan.classes.items())
    }


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Recursive merge of two mappings, in which `over` takes precedence."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[key] = merge(below, value)
        else:
            result[key] = value
    return result


def _problems(plan: ExperimentPlan) -> Iterator[str]:
    if "overall" in plan.classes:
        yield "classes.overall: all requests together have this name in the results; rename the class"
    classes = ", ".join(sorted(plan.classes))
    for name, stream in plan.streams.items():
        for used in (stream.service_class, stream.embed_class):
            if used is not None and used not in plan.classes:
                yield f"streams.{name}: class {used!r} is not in classes ({classes})"
    names = [system.name for system in plan.systems]
    if not names:
        yield "systems: the list is empty; give at least one system"
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"systems: the name {twice[0]!r} is given twice; rename one"
    if plan.reference is not None and plan.reference not in names:
        yield f"reference={plan.reference!r}: no such system; choose one of {', '.join(names)}"
    if names and plan.capacity.rps is None and first_variant(plan.reference_system).is_limited:
        yield (
            f"reference={plan.reference_system.name!r}: max_concurrent keeps it from being saturated; "
            "name another system, or state capacity.rps"
        )
    for system in plan.systems:
        yield from _system_problems(plan, system)


def _missing_endpoints(plan: ExperimentPlan, system: str, endpoints: Endpoints) -> Iterator[str]:
    kinds_of = {"chat": ("generate", "retrieval"), "embeddings": ("embed", "retrieval")}
    for name, kinds in kinds_of.items():
        if getattr(endpoints, name) is not None:
            continue
        for stream, stated in plan.streams.items():
            if stated.kind in kinds:
                yield f"system {system!r}: endpoints.{name}: missing; stream {stream!r} needs it"


def _deadline_problems(plan: ExperimentPlan, system: str, deadlines: WorkflowDeadlines) -> Iterator[str]:
    workflows = {name: stream for name, stream in plan.streams.items() if stream.deadline_ms is not None}
    if not workflows:
        yield f"system {system!r}: deadlines: no stream has a deadline_ms; add it to one of kind: retrieval"
    for name, stream in workflows.items():
        if deadlines.shares and set(deadlines.shares) != set(stream.stages):
            yield (
                f"system {system!r}: deadlines.shares name {', '.join(deadlines.shares)} and stream {name!r} "
                f"has the stages {', '.join(stream.stages)}; give each its share"
            )


def _system_problems(plan: ExperimentPlan, system: SystemSection) -> Iterator[str]:
    for stream in system.arrivals:
        if stream not in plan.streams:
            yield f"system {system.name!r}: arrivals of {stream!r}, which is not in streams"
    if unknown := sorted(set(system.seeds or ()) - set(plan.seeds)):
        yield f"system {system.name!r}: seed {unknown[0]} is not among the experiment's; add it there"
    if system.deadlines is not None:
        yield from _deadline_problems(plan, system.name, system.deadlines)
    if system.endpoints is not None:
        yield from _missing_endpoints(plan, system.name, system.endpoints)
    if (system.tandem is not None or system.split or system.variants) and plan.live is None:
        yield f"system {system.name!r} starts servers; give the models under live"
    sections = system.tandem if system.tandem is not None else system.simulated
    if sections is not None:
        any_objectives = {
            name: dict.fromkeys(described.objectives, _ANY_OBJECTIVE_MS)
            for name, described in plan.classes.items()
        }
        has_pool = system.is_simulated and plan.device_of(system).pool is not None
        content = {
            "models": {"chat": {"model": "any"}, "embeddings": [{"model": "any embeddings"}]},
            "pool": {"kv_allocator": "kvcached" if has_pool else "static"},
            "classes": classes_section(plan, any_objectives),
        }
        try:
            config = parse(merge(content, sections), source=f"system {system.name!r}")
        except ConfigError as error:
            yield str(error)
        else:
            yield from (f"system {system.name!r}: {line}; remove it" for line in unused_keys(config))
