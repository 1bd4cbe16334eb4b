"""Schemas of studies of simulated fleets; `study_reader` reads them from a file."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass as section

from benchmark_control_plane.judge.experiment_schema import Positive, StreamSection, Tokens
from benchmark_control_plane.judge.traces import NAMED
from benchmark_control_plane.simulator.cluster.scenario import BoxModel, FleetScenario, RoutingPolicy
from controlplane.config.fields import STRICT, Fraction, Name
from controlplane.config.fleet_file import AutoscaleSection
from controlplane.fleet.autoscaling import ScalingRule

_QUICK_S = 6.0


def _policy(value: object) -> RoutingPolicy:
    if isinstance(value, RoutingPolicy):
        return value
    if isinstance(value, str) and value in RoutingPolicy.__members__:
        return RoutingPolicy[value]
    raise ValueError(f"should be one of {', '.join(RoutingPolicy.__members__)}")


def _trace(value: object) -> object:
    if value not in NAMED:
        raise ValueError(f"should be one of {', '.join(NAMED)}")
    return value


FileName = Annotated[str, Field(pattern="^[a-z][a-z0-9-]{0,60}$")]
Boxes = Annotated[int, Field(ge=1, le=100_000)]
Routers = Annotated[int, Field(ge=1, le=1_000)]
Policy = Annotated[RoutingPolicy, BeforeValidator(_policy)]
TraceName = Annotated[str, BeforeValidator(_trace)]
Policies = Annotated[tuple[Policy, ...], Field(min_length=1)]
Seeds = Annotated[tuple[int, ...], Field(min_length=1)]
OneSeed = Annotated[tuple[int, ...], Field(min_length=1, max_length=1)]
Rates = Annotated[tuple[Positive, ...], Field(min_length=1)]


@section(frozen=True, config=STRICT)
class FleetSection:
    """Equal boxes but for their `speeds`, which repeat; their routers, and the objectives of all requests."""

    boxes: Boxes
    routers: Routers = 4
    speeds: tuple[Positive, ...] = ()
    ttft_ms: Positive = 500.0
    tpot_ms: Positive = 50.0
    cached_prefixes: Annotated[int, Field(ge=0, le=10_000)] = BoxModel().cached_prefixes

    def scenario(self) -> FleetScenario:
        """The fleet with Tandem's policy."""
        speeds = [self.speeds[box % len(self.speeds)] for box in range(self.boxes)] if self.speeds else ()
        return FleetScenario(
            self.boxes,
            BoxModel(cached_prefixes=self.cached_prefixes),
            speeds=tuple(speeds),
            routers=self.routers,
            ttft=self.ttft_ms / 1_000,
            tpot=self.tpot_ms / 1_000,
        )


@section(frozen=True, config=STRICT)
class DrawnSection:
    """Poisson arrivals with drawn lengths; the keys are arguments of `FleetWorkload.drawn`."""

    median_prompt: Positive = 400.0
    groups: Annotated[int, Field(ge=0, le=10**7)] = 0
    shared_tokens: Annotated[int, Field(ge=0, le=100_000)] = 0
    burst: Annotated[float, Field(ge=1, lt=5)] = 1.0


@section(frozen=True, config=STRICT)
class ConversationsSection:
    """Prompts that grow by turns; the keys are arguments of `FleetWorkload.conversations`."""

    median_message: Annotated[float, Field(gt=0, le=400)] = 200.0
    turns: Annotated[float, Field(ge=1, le=10)] = 6.0
    pause: Positive = 5.0


@section(frozen=True, config=STRICT)
class LoadSection:
    """What arrives: `drawn` requests, `conversations`, or `streams` of an experiment, also recorded ones.

    Requests that arrive within `warm_up` seconds load the boxes and are not counted. Without `names_prefixes`
    prompts share the prefixes of the streams, but routers are not told so.
    """

    rate_per_box: Positive
    seconds: Positive
    warm_up: Annotated[float, Field(ge=0)] = 0.0
    drawn: DrawnSection = DrawnSection()
    conversations: ConversationsSection | None = None
    streams: Annotated[Mapping[Name, StreamSection], Field(min_length=1)] | None = None
    names_prefixes: bool = True

    def __post_init__(self) -> None:
        if self.warm_up >= self.seconds:
            raise ValueError(f"warm_up={self.warm_up:g}: should be below seconds={self.seconds:g}")
        stated = (self.drawn != DrawnSection(), self.conversations is not None, self.streams is not None)
        if sum(stated) > 1:
            raise ValueError("drawn, conversations and streams exclude each other; give one of them")
        if self.streams and any(stream.kind != "generate" for stream in self.streams.values()):
            raise ValueError("streams: simulated boxes have an LLM only; give streams of kind: generate")
        if not self.names_prefixes and self.streams is None:
            raise ValueError("names_prefixes: concerns prefixes of streams; give streams, or drop it")

    def quick(self) -> Self:
        """The same for a few seconds."""
        return replace(self, seconds=min(self.seconds, self.warm_up + _QUICK_S))


@section(frozen=True, config=STRICT)
class SweepCell:
    """A named fleet and load; a file states only how they differ from those of the study."""

    fleet: FleetSection
    load: LoadSection


@section(frozen=True, config=STRICT)
class SweepAxes:
    """Values of which each combination is a row, in the order of these keys.

    Attributes:
        rate_per_box: requests per second and box.
        choices: boxes that Tandem's policy compares.
        policy: of every router.
        routers: number of routers.
        period: seconds between two reports of a box; null for a policy without reports.
        retries: whether routers may try a second box.
        boxes_down: boxes that are down for the middle third of the time.
        router_lost: whether one router is down for the middle third of the time.
    """

    rate_per_box: tuple[Positive, ...] = ()
    choices: tuple[Annotated[int, Field(ge=2)], ...] = ()
    policy: tuple[Policy, ...] = ()
    routers: tuple[Routers, ...] = ()
    period: tuple[Positive | None, ...] = ()
    retries: tuple[bool, ...] = ()
    boxes_down: tuple[Annotated[int, Field(ge=0)], ...] = ()
    router_lost: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if not any(self.stated()):
            raise ValueError(f"no axis; give values of {', '.join(axis.name for axis in fields(self))}")

    def stated(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The axes that have values."""
        for axis in fields(self):
            if values := getattr(self, axis.name):
                yield axis.name, values

    def quick(self) -> Self:
        """The first and the last value of each axis."""
        return replace(self, **{name: tuple(dict.fromkeys((v[0], v[-1]))) for name, v in self.stated()})


@section(frozen=True, config=STRICT)
class SweepStudy:
    """Rows over the values of axes, and over `cells` if there are any; means over the seeds."""

    name: FileName
    question: Name
    fleet: FleetSection
    load: LoadSection
    sweeps: Annotated[tuple[SweepAxes, ...], Field(min_length=1)]
    cells: Mapping[Name, SweepCell] = Field(default_factory=dict)
    seeds: Seeds = (1, 2, 3)

    def quick(self) -> Self:
        """The ends of the axes and the first cell, on one seed for a few seconds."""
        first = {name: replace(cell, load=cell.load.quick()) for name, cell in list(self.cells.items())[:1]}
        return replace(
            self,
            load=self.load.quick(),
            sweeps=tuple(axes.quick() for axes in self.sweeps),
            cells=first,
            seeds=self.seeds[:1],
        )


@section(frozen=True, config=STRICT)
class CapacityStudy:
    """The highest rate per box at which the share `kept` of the requests meets its objectives.

    Attributes:
        seconds: until the last arrival.
        warm_up: seconds whose requests load the boxes and are not counted.
        requests: the fewest that are counted; a fleet of few boxes runs for longer.
    """

    name: FileName
    question: Name
    boxes: Annotated[tuple[Boxes, ...], Field(min_length=1)]
    policies: Policies
    seconds: Positive
    warm_up: Annotated[float, Field(ge=0)] = 0.0
    requests: Tokens = 200_000
    ttft_ms: Positive = 500.0
    kept: Annotated[Fraction, Field(gt=0, lt=1)] = 0.9
    seeds: Seeds = (1,)

    def __post_init__(self) -> None:
        if self.warm_up >= self.seconds:
            raise ValueError(f"warm_up={self.warm_up:g}: should be below seconds={self.seconds:g}")

    def quick(self) -> Self:
        """The smallest fleet on one seed, with few requests."""
        return replace(self, boxes=self.boxes[:1], requests=min(self.requests, 2_000), seeds=self.seeds[:1])


@section(frozen=True, config=STRICT)
class ScaleRun:
    """One run: so many boxes in so many cells, each with its own routers."""

    boxes: Boxes
    seconds: Positive = 10.0
    cells: Annotated[int, Field(ge=1)] = 1
    routers: Routers = 16
    processes: Annotated[int, Field(ge=1, le=64)] = 1

    def __post_init__(self) -> None:
        if self.boxes % self.cells:
            raise ValueError(f"cells={self.cells}: does not divide boxes={self.boxes}")


@section(frozen=True, config=STRICT)
class ScaleStudy:
    """Time and memory of the simulation itself, at one rate."""

    name: FileName
    question: Name
    rate_per_box: Positive
    runs: Annotated[tuple[ScaleRun, ...], Field(min_length=1)]
    ttft_ms: Positive = 500.0
    seeds: OneSeed = (1,)

    def quick(self) -> Self:
        """The first run."""
        return replace(self, runs=self.runs[:1])


@section(frozen=True, config=STRICT)
class AccuracyCells:
    """Fleets of which each combination is simulated by both models."""

    boxes: Annotated[tuple[Boxes, ...], Field(min_length=1)]
    rates: Rates
    policies: Policies = (RoutingPolicy.TANDEM,)


@section(frozen=True, config=STRICT)
class AccuracyStudy:
    """The event model against the gate-exact simulation, on the same requests and draws."""

    name: FileName
    question: Name
    cells: AccuracyCells
    seconds: Positive
    ttft_ms: Positive = 500.0
    ordering: Name = "fcfs"
    seeds: OneSeed = (1,)

    def quick(self) -> Self:
        """The smallest fleet for a few seconds."""
        cells = replace(self.cells, boxes=self.cells.boxes[:1], rates=self.cells.rates[:1])
        return replace(self, cells=cells, seconds=min(self.seconds, 2.0))


@section(frozen=True, config=STRICT)
class KindsStudy:
    """Fleets of mixed and of dedicated boxes by `tandem fleet plan`, at several shares of documents."""

    name: FileName
    question: Name
    rate: Positive
    indexing: Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], ...], Field(min_length=1)]
    requests: Tokens = 400
    seeds: OneSeed = (0,)

    def quick(self) -> Self:
        """The first share, with few requests at each simulated rate."""
        return replace(self, indexing=self.indexing[:1], requests=min(self.requests, 60))


@section(frozen=True, config=STRICT)
class AutoscalingStudy:
    """The autoscaling rule on recorded arrivals, whose volume is scaled to `mean_load` boxes' work.

    Attributes:
        autoscale: the rule, as in a fleet file.
        min_boxes: the fewest boxes.
        traces: recorded arrivals by name.
        mean_load: mean work, in boxes.
        bin_s: seconds over which arrivals are averaged, as boxes spread the work of a request over its time.
        noise: deviation of the utilisation that a box states, relative to its own.
    """

    name: FileName
    question: Name
    autoscale: AutoscaleSection
    min_boxes: Boxes
    traces: Annotated[tuple[TraceName, ...], Field(min_length=1)]
    mean_load: Positive
    bin_s: Annotated[int, Field(ge=1, le=3_600)] = 10
    noise: Annotated[float, Field(ge=0, le=1)] = 0.05
    seeds: Seeds = (1, 2, 3)

    def __post_init__(self) -> None:
        if self.min_boxes > self.autoscale.max_boxes:
            raise ValueError(
                f"min_boxes={self.min_boxes} exceeds autoscale.max_boxes={self.autoscale.max_boxes}; lower it"
            )

    @property
    def rule(self) -> ScalingRule:
        """The rule's parameters."""
        stated = self.autoscale
        return ScalingRule(
            self.min_boxes, stated.max_boxes, stated.start_s, stated.utilisation, stated.lower_after_s
        )

    def quick(self) -> Self:
        """The first trace on one seed."""
        return replace(self, traces=self.traces[:1], seeds=self.seeds[:1])
