"""What may an experiment's file say of its workload, its systems and its clock? One section each."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from benchmark_control_plane.judge.traces import NAMED
from controlplane.config.fields import STRICT, Bytes, Fraction, Milliseconds, Name
from controlplane.config.models import ChatModel, EmbeddingModel

Positive = Annotated[float, Field(gt=0)]
Tokens = Annotated[int, Field(ge=1)]
Times = Annotated[float, Field(gt=0, le=1_000)]


@section(frozen=True, config=STRICT)
class Bursts:
    """All requests come in the first `on_s` of every `on_s + off_s` seconds."""

    on_s: Positive
    off_s: Positive


@section(frozen=True, config=STRICT)
class Wave:
    period_s: Positive
    amplitude: Fraction


@section(frozen=True, config=STRICT)
class Arrivals:
    """Gaps with coefficient of variation `cv`: 0 even, 1 Poisson, above it Gamma."""

    cv: Annotated[float, Field(ge=0, le=20)] = 1.0
    bursts: Bursts | None = None
    wave: Wave | None = None

    def __post_init__(self) -> None:
        if self.bursts is not None and self.wave is not None:
            raise ValueError("a stream either bursts or swings; give bursts or wave")


@section(frozen=True, config=STRICT)
class LengthsSection:
    """One of them. A lognormal is stated by its mean and median before it is cut at `cap`."""

    fixed: Tokens | None = None
    between: tuple[Tokens, Tokens] | None = None
    lognormal: tuple[Positive, Positive, Tokens] | None = None
    preset: Literal["short", "mid", "long"] | None = None

    def __post_init__(self) -> None:
        stated = (self.fixed, self.between, self.lognormal, self.preset)
        if sum(one is not None for one in stated) != 1:
            raise ValueError(
                "give exactly one of fixed: N, between: [least, most], "
                "lognormal: [mean, median, cap], preset: short|mid|long"
            )
        if self.between is not None and self.between[0] > self.between[1]:
            raise ValueError(f"between={list(self.between)}: the least comes first; swap them")
        if self.lognormal is not None and self.lognormal[0] < self.lognormal[1]:
            raise ValueError(f"lognormal={list(self.lognormal)}: its mean is not below its median; swap them")


@section(frozen=True, config=STRICT)
class ColumnNames:
    at: Name
    prompt: Name
    output: Name | None = None
    query: Name | None = None


@section(frozen=True, config=STRICT)
class TraceSection:
    """`name` of a known trace, or `file` with its `columns`; either below the data folder or a full path.

    Lengths are multiplied by their scale and then cut, so that long prompts fit a small model.
    """

    name: str | None = None
    file: Name | None = None
    columns: ColumnNames | None = None
    prompt_scale: Positive = 1.0
    output_scale: Positive = 1.0
    prompt_cap: Tokens = 1_000_000
    output_cap: Tokens = 1_000_000

    def __post_init__(self) -> None:
        if (self.name is None) == (self.file is None):
            raise ValueError("a trace has either a name or a file; give one of them")
        if (self.file is None) != (self.columns is None):
            raise ValueError("columns go with file: at, prompt and, where there are, output and query")
        if self.name is not None and self.name not in NAMED:
            raise ValueError(f"name={self.name!r}: no such trace; known are {', '.join(sorted(NAMED))}")

    @property
    def has_queries(self) -> bool:
        columns = self.columns or NAMED[self.name or ""][1]
        return columns.query is not None


_TAKEN: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "generate": (("prompt_tokens", "output_tokens"), ("max_tokens",)),
    "embed": (("prompt_tokens",), ("batch",)),
    "retrieval": (("prompt_tokens", "output_tokens", "query_tokens"), ("max_tokens", "embed_class")),
}
"""By kind: the lengths that the stream or its trace must state, and what else it may."""


@section(frozen=True, config=STRICT)
class StreamSection:
    """`share` of what arrives. A retrieval is an embedding and, when that has answered, a generation: two
    requests, of which `embed_class` names the first one's class.

    With a trace and no arrivals the trace is replayed, its time scaled to the stream's rate; with arrivals
    its rows are drawn at random. The client asks for `max_tokens` where a server may not know the
    answer's length (simulator only: a real one stops where it is told).
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

    def __post_init__(self) -> None:
        lengths, others = _TAKEN[self.kind]
        for name in ("prompt_tokens", "output_tokens", "query_tokens", "max_tokens", "batch", "embed_class"):
            if getattr(self, name) is not None and name not in (*lengths, *others):
                raise ValueError(f"{name}: kind: {self.kind} takes none; drop it")
        if self.kind == "retrieval" and self.embed_class is None:
            raise ValueError("embed_class: missing; kind: retrieval needs it")
        for name in lengths:
            is_traced = self.trace is not None and (name != "query_tokens" or self.trace.has_queries)
            if is_traced and getattr(self, name) is not None:
                raise ValueError(f"{name}: the trace states it; drop one of them")
            if not is_traced and getattr(self, name) is None:
                raise ValueError(f"{name}: missing; kind: {self.kind} needs it, or a trace that has it")


@section(frozen=True, config=STRICT)
class Multiples:
    """Of the median latency of a request that is alone, on the reference system, in the same experiment."""

    ttft: Times | None = None
    tpot: Times | None = None
    e2e: Times | None = None


@section(frozen=True, config=STRICT)
class ClassSection:
    """A class. Each objective is stated in milliseconds or as a multiple of the unloaded latency."""

    priority: Annotated[int, Field(ge=0, le=100)] = 0
    sheddable: bool = True
    default: bool = False
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None
    times_unloaded: Multiples = Multiples()

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e"):
            if getattr(self, f"{name}_ms") is not None and getattr(self.times_unloaded, name) is not None:
                raise ValueError(f"{name}_ms and times_unloaded.{name} state one objective twice; drop one")


@section(frozen=True, config=STRICT)
class WindowSection:
    """Seconds: sent but not counted, counted, and given to what is unfinished after the last was sent."""

    warmup_s: Annotated[float, Field(ge=0)] = 2.0
    measured_s: Positive = 10.0
    drain_s: Positive = 10.0
    connections: Annotated[int, Field(ge=1, le=10_000)] = 512
    lateness_limit_ms: Positive = 25.0


@section(frozen=True, config=STRICT)
class CapacitySection:
    """What 100 % load is: stated, or the rate at which `clients` that never pause are served."""

    rps: Positive | None = None
    clients: Annotated[int, Field(ge=1, le=10_000)] = 48
    probe_s: Positive = 10.0


@section(frozen=True, config=STRICT)
class Pinned:
    """Where a server process may run, and with how many threads it computes."""

    cores: tuple[Annotated[int, Field(ge=0)], ...] = ()
    threads: Annotated[int, Field(ge=1)] = 1


@section(frozen=True, config=STRICT)
class Split:
    """vLLM's own server and an embedding server beside it, the machine divided once and for all.

    `kv_cache` and `embed_batch_tokens`, where stated, replace those of the models. `flags` are vLLM's
    arguments besides the model's; with `priorities` requests carry vLLM's `priority`.
    """

    llm: Pinned = Pinned()
    embedder: Pinned = Pinned()
    kv_cache: Bytes | None = None
    embed_batch_tokens: Tokens | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    priorities: bool = False


@section(frozen=True, config=STRICT)
class Endpoint:
    """`text` for a server that takes no token ids: words then, each about a token."""

    url: Annotated[str, Field(pattern=r"^http://[^/:]+(:\d+)?$")]
    model: Name
    api: Literal["completions", "chat"] = "completions"
    api_key: str | None = None
    text: bool = False


@section(frozen=True, config=STRICT)
class Endpoints:
    """Servers that are already up. `classes` sends our header x-service-class."""

    chat: Endpoint | None = None
    embeddings: Endpoint | None = None
    classes: bool = False
    metrics: bool = False


@section(frozen=True, config=STRICT)
class SimulatedDeviceSection:
    """Seconds of a step: base, and for each prompt token, decoding request, KV cell read; of an embedding
    pass: base and per padded token. With `pool` KV cache and embedding workspace share it, divided by the
    `quota` section of each system; else each has its own."""

    step: tuple[float, float, float, float] = (0.0067, 2.0e-5, 7.6e-5, 1.0e-8)
    embedding: tuple[float, float] = (0.003, 4.0e-6)
    kv_memory: Bytes | None = None
    kv_bytes_per_token: Bytes = 131_072
    max_model_tokens: Tokens = 4_096
    max_running: Tokens = 256
    step_tokens: Tokens = 2_048
    embed_batch_tokens: Tokens = 16_384
    embed_input_tokens: Tokens = 512
    embed_bytes_per_token: Bytes = 1_024
    pool: Bytes | None = None
    workspace_batches: Tokens = 2


@section(frozen=True, config=STRICT)
class Live:
    """The models that tandem and split systems start, and the memory of tandem's pool."""

    chat: ChatModel
    embedding: EmbeddingModel
    pool_memory: Bytes = 2 * 2**30


@section(frozen=True, config=STRICT)
class SystemSection:
    """Exactly one of `tandem` (sections of its YAML), `split`, `endpoints`, `simulated` (sections again) and
    `ungated` (the simulated engines without a gate).

    `variants` are tried first and the best one runs; `loads` and `seeds` replace the experiment's.
    """

    name: Name
    kind: Literal["tandem", "ablation", "baseline"]
    description: str = ""
    tandem: Mapping[str, Any] | None = None
    split: Split | None = None
    endpoints: Endpoints | None = None
    simulated: Mapping[str, Any] | None = None
    ungated: bool = False
    variants: Mapping[Name, Split] = field(default_factory=dict)
    device: SimulatedDeviceSection | None = None
    arrivals: Mapping[Name, Arrivals] = field(default_factory=dict)
    loads: tuple[Positive, ...] | None = None
    seeds: tuple[int, ...] | None = None
    frontier: bool = True

    def __post_init__(self) -> None:
        stated = {
            "tandem": self.tandem is not None,
            "split": self.split is not None or bool(self.variants),
            "endpoints": self.endpoints is not None,
            "simulated": self.simulated is not None,
            "ungated": self.ungated,
        }
        if sum(stated.values()) != 1:
            given = ", ".join(name for name, is_stated in stated.items() if is_stated) or "none"
            raise ValueError(
                f"system {self.name!r} states {given}; give exactly one of {', '.join(stated)} "
                "(or variants of split)"
            )

    @property
    def is_simulated(self) -> bool:
        return self.ungated or self.simulated is not None
