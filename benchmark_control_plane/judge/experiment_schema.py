"""Schema of the sections of an experiment file: workload, classes and measurement window."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from benchmark_control_plane.judge.traces import NAMED, TraceColumns
from benchmark_control_plane.judge.workflow_stages import STAGES
from controlplane.config.fields import STRICT, Fraction, Milliseconds, Name

Positive = Annotated[float, Field(gt=0)]
Tokens = Annotated[int, Field(ge=1)]
Times = Annotated[float, Field(gt=0, le=1_000)]


@section(frozen=True, config=STRICT)
class Bursts:
    """On-off arrivals: all requests in the first `on_s` of every `on_s + off_s` seconds."""

    on_s: Positive
    off_s: Positive


@section(frozen=True, config=STRICT)
class Wave:
    """Sinusoidal arrival rate with this period and relative amplitude."""

    period_s: Positive
    amplitude: Fraction


@section(frozen=True, config=STRICT)
class Arrivals:
    """Renewal arrivals with coefficient of variation `cv`: 0 even, 1 Poisson, otherwise Gamma."""

    cv: Annotated[float, Field(ge=0, le=20)] = 1.0
    bursts: Bursts | None = None
    wave: Wave | None = None

    def __post_init__(self) -> None:
        if self.bursts is not None and self.wave is not None:
            raise ValueError("bursts and wave exclude each other; give bursts or wave")


@section(frozen=True, config=STRICT)
class LengthsSection:
    """Distribution of token counts, by exactly one key; `lognormal` is (mean, median, cap) before capping."""

    fixed: Tokens | None = None
    between: tuple[Tokens, Tokens] | None = None
    lognormal: tuple[Positive, Positive, Tokens] | None = None
    preset: Literal["short", "mid", "long"] | None = None

    def __post_init__(self) -> None:
        stated = (self.fixed, self.between, self.lognormal, self.preset)
        if sum(part is not None for part in stated) != 1:
            raise ValueError(
                "give exactly one of fixed: N, between: [least, most], "
                "lognormal: [mean, median, cap], preset: short|mid|long"
            )
        if self.between is not None and self.between[0] > self.between[1]:
            raise ValueError(f"between={list(self.between)}: the smaller number comes first; swap them")
        if self.lognormal is not None and self.lognormal[0] < self.lognormal[1]:
            raise ValueError(
                f"lognormal={list(self.lognormal)}: the mean must not be below the median; swap them"
            )


@section(frozen=True, config=STRICT)
class TraceSection:
    """A known trace by `name`, or a `file` with its `columns`, relative to the data folder or absolute.

    Lengths are capped, so that long prompts fit a small model.
    """

    name: str | None = None
    file: Name | None = None
    columns: TraceColumns | None = None
    prompt_cap: Tokens = 1_000_000
    output_cap: Tokens = 1_000_000

    def __post_init__(self) -> None:
        if (self.name is None) == (self.file is None):
            raise ValueError("a trace needs exactly one of name and file; give one of them")
        if (self.file is None) != (self.columns is None):
            raise ValueError(
                "columns go with file, and file needs columns: at, prompt and, if present, output and query"
            )
        if self.name is not None and self.name not in NAMED:
            raise ValueError(f"name={self.name!r}: no such trace; known are {', '.join(sorted(NAMED))}")

    @property
    def has_queries(self) -> bool:
        """Whether the trace has lengths of embedding queries."""
        return self._stated.query is not None

    @property
    def has_prefixes(self) -> bool:
        """Whether the trace has the prefixes that its prompts share."""
        return self._stated.pieces is not None

    @property
    def _stated(self) -> TraceColumns:
        return self.columns or NAMED[self.name or ""][1]


@section(frozen=True, config=STRICT)
class SharedPrefixSection:
    """The first `tokens` tokens of each prompt are those of one of `groups` prefixes, drawn at random.

    A shorter prompt shares all but its last token.
    """

    groups: Tokens
    tokens: Tokens


_KEYS_BY_KIND: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "generate": (("prompt_tokens", "output_tokens"), ("max_tokens", "shared_prefix")),
    "embed": (("prompt_tokens",), ("batch",)),
    "retrieval": (
        ("prompt_tokens", "output_tokens", "query_tokens"),
        ("max_tokens", "embed_class", "shared_prefix", "passages", "passage_tokens", "deadline_ms"),
    ),
}
"""By kind: lengths that the stream or its trace must give, and further keys that are allowed."""


@section(frozen=True, config=STRICT)
class StreamSection:
    """A workload stream, with its relative share of the requests.

    A retrieval is an embedding of class `embed_class`, and a generation sent when the embedding is complete.
    With `passages` so many inputs of `passage_tokens` are scored between them, also in `embed_class`. With
    `deadline_ms` the stages of a retrieval are a workflow, of which the last response is due so long after
    the first request. A trace without `arrivals` is replayed, with time scaled to the stream's rate; with
    `arrivals` its rows are drawn at random. `max_tokens` is the limit that the client requests, if it should
    differ from the output length (simulator only; on a real engine the limit is the output length).
    `prompt_tokens` include the `shared_prefix`.
    """

    kind: Literal["generate", "embed", "retrieval"]
    service_class: Name
    share: Annotated[float, Field(gt=0)]
    embed_class: Name | None = None
    tenant: Name = "default"
    arrivals: Arrivals | None = None
    trace: TraceSection | None = None
    prompt_tokens: LengthsSection | None = None
    output_tokens: LengthsSection | None = None
    query_tokens: LengthsSection | None = None
    max_tokens: Tokens | None = None
    batch: LengthsSection | None = None
    passages: LengthsSection | None = None
    passage_tokens: LengthsSection | None = None
    deadline_ms: Milliseconds | None = None
    shared_prefix: SharedPrefixSection | None = None

    @property
    def stages(self) -> Sequence[str]:
        """The requests of one arrival of a retrieval, in order; one for any other kind."""
        if self.kind != "retrieval":
            return (self.kind,)
        return STAGES if self.passages is not None else tuple(name for name in STAGES if name != "rerank")

    def __post_init__(self) -> None:
        lengths, others = _KEYS_BY_KIND[self.kind]
        for name in sorted({key for keys in _KEYS_BY_KIND.values() for part in keys for key in part}):
            if getattr(self, name) is not None and name not in (*lengths, *others):
                raise ValueError(f"{name}: kind: {self.kind} takes none; drop it")
        if self.kind == "retrieval" and self.embed_class is None:
            raise ValueError("embed_class: missing; kind: retrieval needs it")
        if (self.passages is None) != (self.passage_tokens is None):
            raise ValueError("passages and passage_tokens go together; give both or none")
        if self.shared_prefix is not None and self.trace is not None and self.trace.has_prefixes:
            raise ValueError("shared_prefix: the trace states it; drop one of them")
        for name in lengths:
            is_traced = self.trace is not None and (name != "query_tokens" or self.trace.has_queries)
            if is_traced and getattr(self, name) is not None:
                raise ValueError(f"{name}: the trace states it; drop one of them")
            if not is_traced and getattr(self, name) is None:
                raise ValueError(f"{name}: missing; kind: {self.kind} needs it, or a trace that has it")


@section(frozen=True, config=STRICT)
class WorkloadSection:
    """A workload of its own, without systems: the file of `tandem capacity --workload`."""

    streams: Annotated[Mapping[Name, StreamSection], Field(min_length=1)]


@section(frozen=True, config=STRICT)
class Multiples:
    """Objectives as multiples of the median unloaded latency on the reference system."""

    ttft: Times | None = None
    tpot: Times | None = None
    e2e: Times | None = None
    gap: Times | None = None


_OBJECTIVES = ("ttft", "tpot", "e2e", "gap")


@section(frozen=True, config=STRICT)
class ExperimentClass:
    """A service class; each objective is in milliseconds or a multiple of the unloaded latency."""

    priority: Annotated[int, Field(ge=0, le=100)] = 0
    sheddable: bool = True
    default: bool = False
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None
    gap_ms: Milliseconds | None = None
    times_unloaded: Multiples = Multiples()

    def __post_init__(self) -> None:
        for name in _OBJECTIVES:
            if getattr(self, f"{name}_ms") is not None and getattr(self.times_unloaded, name) is not None:
                raise ValueError(f"{name}_ms and times_unloaded.{name} state one objective twice; drop one")

    @property
    def objectives(self) -> tuple[str, ...]:
        """The keys of the stated objectives, as in the server's configuration."""
        return tuple(
            f"{name}_ms"
            for name in _OBJECTIVES
            if getattr(self, f"{name}_ms") or getattr(self.times_unloaded, name)
        )


@section(frozen=True, config=STRICT)
class WindowSection:
    """Phases of a run in seconds: warm-up (not counted), measured, and drain after the last request is sent.

    A run is invalid if the 99th percentile of the send delay exceeds `lateness_limit_ms`.
    """

    warmup_s: Annotated[float, Field(ge=0)] = 2.0
    measured_s: Positive = 10.0
    drain_s: Positive = 10.0
    lateness_limit_ms: Positive = 25.0


@section(frozen=True, config=STRICT)
class CapacitySection:
    """100 % load: `rps`, or the throughput with `clients` closed-loop clients over `probe_s` seconds."""

    rps: Positive | None = None
    clients: Annotated[int, Field(ge=1, le=10_000)] = 48
    probe_s: Positive = 10.0
