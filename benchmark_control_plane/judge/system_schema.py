"""Schema of the systems of an experiment: what is started, reached or simulated."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from benchmark_control_plane.judge.experiment_schema import Arrivals, Positive, Tokens
from benchmark_control_plane.judge.workflow_stages import WorkflowDeadlines
from controlplane.config.fields import STRICT, Bytes, Name
from controlplane.config.models_section import ChatModel, EmbeddingModel

Requests = Annotated[int, Field(ge=1)]


@section(frozen=True, config=STRICT)
class Pinned:
    """CPU cores of a server process, its number of compute threads and its niceness, also as a session.

    With `idle` (embedder only) the process that computes runs in Linux's idle scheduling class.
    """

    cores: tuple[Annotated[int, Field(ge=0)], ...] = ()
    threads: Annotated[int, Field(ge=1)] = 1
    nice: Annotated[int, Field(ge=0, le=19)] = 0
    idle: bool = False


@section(frozen=True, config=STRICT)
class QueueLimits:
    """`max_concurrent` of the two endpoints of a split."""

    llm: Requests | None = None
    embedder: Requests | None = None


@section(frozen=True, config=STRICT)
class Split:
    """Baseline: vLLM's server and an embedding server that share the machine statically.

    `kv_cache` and `embed_batch_tokens` replace the values of the models. `flags` are further engine arguments
    of vLLM; with `priorities`, requests carry vLLM's `priority`. `max_concurrent` is the queue limit of a
    reverse proxy in front of each server, see `Endpoint`.
    """

    llm: Pinned = Pinned()
    embedder: Pinned = Pinned()
    kv_cache: Bytes | None = None
    embed_batch_tokens: Tokens | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    priorities: bool = False
    max_concurrent: QueueLimits = QueueLimits()

    def __post_init__(self) -> None:
        if self.llm.idle:
            raise ValueError("llm.idle: only the embedding worker runs in the idle class; set embedder.idle")


@section(frozen=True, config=STRICT)
class Endpoint:
    """Address and model of a server; with `text`, prompts are words of about one token, not token ids.

    `max_concurrent` limits the requests that the server has at a time, as nginx's `limit_conn` does: one
    beyond it gets status 429 at once and counts as rejected. The load generator counts them, so that the
    limit costs the server no CPU time.
    """

    url: Annotated[str, Field(pattern=r"^http://[^/:]+(:\d+)?$")]
    model: Name
    api: Literal["completions", "chat"] = "completions"
    api_key: str | None = None
    text: bool = False
    max_concurrent: Requests | None = None


@section(frozen=True, config=STRICT)
class Endpoints:
    """Running servers.

    `classes` sends the header x-service-class, `priorities` vLLM's priorities by class; `metrics` reads
    /metrics of the chat server.
    """

    chat: Endpoint | None = None
    embeddings: Endpoint | None = None
    classes: bool = False
    priorities: bool = False
    metrics: bool = False


@section(frozen=True, config=STRICT)
class SimulatedDeviceSection:
    """A simulated device.

    `step` holds the seconds of an engine step: base, per prompt token, per decoding request and per KV cell
    read; `embedding` those of a pass: base and per padded token, `embedding_squares` per input and squared
    length. With `pool`, KV cache and workspace share that memory by the `quota` of a system; otherwise each
    has its own. Without `prefix_cache` requests with a `shared_prefix` compute and hold it each on its own.
    """

    step: tuple[float, float, float, float] = (0.0067, 2.0e-5, 7.6e-5, 1.0e-8)
    embedding: tuple[float, float] = (0.003, 4.0e-6)
    embedding_squares: Annotated[float, Field(ge=0)] = 0.0
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
    prefix_cache: bool = True


@section(frozen=True, config=STRICT)
class Live:
    """Models that tandem and split systems start, and the memory of Tandem's pool."""

    chat: ChatModel
    embedding: EmbeddingModel
    pool_memory: Bytes = 2 * 2**30


@section(frozen=True, config=STRICT)
class SystemSection:
    """A system to measure.

    Exactly one of `tandem` (sections of the server's YAML), `split`, `endpoints`, `simulated` (sections, on
    the simulated device) and `ungated` (simulated engines without the gate). Of `variants` of a split, the
    best one in a trial run is measured. `deadlines` is what requests of a workflow state of its deadline;
    without it nothing. `loads` and `seeds` replace those of the experiment. A system of kind `what-if` is
    given what Tandem lacks, such as a larger `device`; with `known_lengths` its requests state the number of
    output tokens as their limit.
    """

    name: Name
    kind: Literal["tandem", "ablation", "baseline", "what-if"]
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
    deadlines: WorkflowDeadlines | None = None
    known_lengths: bool = False
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
        """Whether the system runs in virtual time."""
        return self.ungated or self.simulated is not None

    @property
    def starts_servers(self) -> bool:
        """Whether the experiment starts its servers, on this machine."""
        return not self.is_simulated and self.endpoints is None

    @property
    def is_limited(self) -> bool:
        """Whether `max_concurrent` limits the requests at one of its servers."""
        given = self.endpoints or Endpoints()
        ends = [end.max_concurrent for end in (given.chat, given.embeddings) if end is not None]
        splits = [split for split in (self.split, *self.variants.values()) if split is not None]
        return any(ends) or any(split.max_concurrent != QueueLimits() for split in splits)
