"""What does the operator want? One YAML file, parsed once into frozen dataclasses.

Every error names the path in the file, the value, the rule and the remedy. Nothing unknown is accepted,
so a typing error never becomes a silent default.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as section

from controlplane.core.clock import Duration, milliseconds
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.admission import Admission, AdmissionOptions
from controlplane.policy.catalogue import ADMISSIONS, ORDERINGS, chosen
from controlplane.policy.eviction import EvictionOptions
from controlplane.policy.ordering import Ordering, OrderingOptions

_STRICT = ConfigDict(extra="forbid", strict=False, arbitrary_types_allowed=True)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class ConfigError(ValueError):
    """The file cannot be used; the message has one line for each thing to put right."""


def parse_bytes(value: object) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if not match or match[2].upper() not in _UNITS or isinstance(value, bool):
        raise ValueError("a size is a number of bytes or a text like 512MiB or 80GB")
    return round(float(match[1]) * _UNITS[match[2].upper()])


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Milliseconds = Annotated[float, Field(gt=0, le=86_400_000)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(min_length=1, max_length=200)]


@section(frozen=True, config=_STRICT)
class ServerSection:
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    max_body: Bytes = 32 * 2**20
    overload_status: Literal[429, 503] = 429
    drain_ms: Milliseconds = 30_000
    stalled_client_ms: Milliseconds = 60_000
    admin_key_sha256: Sha256 | None = None


@section(frozen=True, config=_STRICT)
class ChatModel:
    """`engine` is passed to vLLM as it stands (vLLM's own argument names)."""

    model: Name
    name: Name | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str | None = None

    def __post_init__(self) -> None:
        if "gpu_memory_utilization" in self.engine:
            raise ValueError(
                "engine.gpu_memory_utilization: the KV cache is sized by `pool` and `quota.llm`; remove it"
            )

    @property
    def served_name(self) -> str:
        return self.name or self.model


@section(frozen=True, config=_STRICT)
class EmbeddingModel:
    model: Name
    name: Name | None = None
    batch_tokens: Annotated[int, Field(ge=1)] = 16_384
    device: str | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    max_running: Annotated[int, Field(ge=1)] = 256
    threads: Annotated[int, Field(ge=1)] | None = None
    max_input_tokens: Annotated[int, Field(ge=1)] | None = None
    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = ()
    trust_remote_code: bool = False

    @property
    def served_name(self) -> str:
        return self.name or self.model


@section(frozen=True, config=_STRICT)
class ModelsSection:
    chat: ChatModel | None = None
    embeddings: tuple[EmbeddingModel, ...] = ()

    def __post_init__(self) -> None:
        names = [m.served_name for m in (self.chat, *self.embeddings) if m is not None]
        if not names:
            raise ValueError("no model is configured; add chat, embeddings or both")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{twice[0]!r} names two models; give one of them another `name`")


@section(frozen=True, config=_STRICT)
class PoolSection:
    """`memory` is the whole device's; what the models' weights, `activation`, `reserve` and the margin
    leave is shared out by quota."""

    memory: Bytes | Literal["auto"] = "auto"
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.1
    activation: Bytes | Literal["auto"] = "auto"
    reserve: Bytes = 0


@section(frozen=True, config=_STRICT)
class ClassSection:
    priority: Annotated[int, Field(ge=0, le=100)] = 0
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None
    sheddable: bool = True
    default: bool = False

    def service_class(self, name: str) -> ServiceClass:
        slo = Slo(_duration(self.ttft_ms), _duration(self.tpot_ms), _duration(self.e2e_ms))
        return ServiceClass(name, slo, self.priority, self.sheddable)


@section(frozen=True, config=_STRICT)
class TenantSection:
    api_keys_sha256: Annotated[tuple[Sha256, ...], Field(min_length=1)]
    classes: tuple[str, ...] | None = None
    requests_per_minute: Annotated[float, Field(gt=0)] | None = None
    tokens_per_minute: Annotated[float, Field(gt=0)] | None = None


@section(frozen=True, config=_STRICT)
class AdmissionSection:
    """`engine_queue` requests beyond the engine's own limit are sent ahead, so that those that finish
    are replaced in the engine's next step; there they wait in the gate's order, but can no longer be
    rejected."""

    policy: str = "look-ahead"
    lengths: Literal["history", "max-tokens"] = "history"
    overflow_probability: Annotated[float, Field(gt=0, lt=1)] = 0.05
    max_waiting: Annotated[int, Field(ge=0)] = 1_000
    max_wait_ms: Milliseconds = 60_000
    defer_threshold_ms: Annotated[float, Field(ge=0)] = 0
    engine_queue: Annotated[int, Field(ge=0)] = 64
    victim_tau_ms: Milliseconds = 100
    victim_almost_done_steps: Annotated[int, Field(ge=0)] = 8
    victim_thrash_penalty: Annotated[float, Field(ge=0)] = 1.0


@section(frozen=True, config=_STRICT)
class ShareSection:
    """A fraction of the pool."""

    nominal: Fraction


@section(frozen=True, config=_STRICT)
class QuotaSection:
    llm: ShareSection = ShareSection(nominal=0.9)
    embedding: ShareSection = ShareSection(nominal=0.1)

    def __post_init__(self) -> None:
        if self.llm.nominal + self.embedding.nominal > 1 + 1e-9:
            raise ValueError(
                f"shares must sum to at most 1 and quota.llm.nominal={self.llm.nominal} + "
                f"quota.embedding.nominal={self.embedding.nominal} do not; lower one of them"
            )


@section(frozen=True, config=_STRICT)
class SchedulingSection:
    ordering: str = "edf"
    priority_head_start_ms: Annotated[float, Field(ge=0)] = 1_000
    patience_ms: Milliseconds = 10_000


def _standard_class() -> dict[str, ClassSection]:
    return {"standard": ClassSection(default=True, sheddable=False)}


@section(frozen=True, config=_STRICT)
class Config:
    models: ModelsSection
    server: ServerSection = ServerSection()
    pool: PoolSection = PoolSection()
    classes: Mapping[Name, ClassSection] = field(default_factory=_standard_class)
    tenants: Mapping[Name, TenantSection] = field(default_factory=dict)
    admission: AdmissionSection = AdmissionSection()
    quota: QuotaSection = QuotaSection()
    scheduling: SchedulingSection = SchedulingSection()

    def __post_init__(self) -> None:
        defaults = [name for name, c in self.classes.items() if c.default]
        if len(defaults) != 1:
            raise ValueError(
                f"classes: exactly one class is the default, not {len(defaults)} "
                f"({', '.join(defaults) or 'none'}); set `default: true` in one of them"
            )
        for tenant, settings in self.tenants.items():
            unknown = sorted(set(settings.classes or ()) - set(self.classes))
            if unknown:
                raise ValueError(
                    f"tenants.{tenant}.classes={unknown[0]!r}: no such class; "
                    f"known are {', '.join(sorted(self.classes))}"
                )
        self.admission_policy()
        self.ordering_policy()

    def service_classes(self) -> dict[str, ServiceClass]:
        return {name: c.service_class(name) for name, c in self.classes.items()}

    def default_class(self) -> str:
        return next(name for name, c in self.classes.items() if c.default)

    def admission_policy(self) -> Admission:
        a = self.admission
        options = AdmissionOptions(
            a.overflow_probability,
            a.max_waiting,
            milliseconds(a.max_wait_ms),
            milliseconds(a.defer_threshold_ms),
        )
        eviction = EvictionOptions(
            milliseconds(a.victim_tau_ms), a.victim_almost_done_steps, a.victim_thrash_penalty
        )
        return Admission(options, eviction, chosen("admission.policy", ADMISSIONS, a.policy))

    def ordering_policy(self) -> Ordering:
        s = self.scheduling
        options = OrderingOptions(milliseconds(s.priority_head_start_ms), milliseconds(s.patience_ms))
        return chosen("scheduling.ordering", ORDERINGS, s.ordering)(options)


def load(path: Path) -> Config:
    """Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a YAML file") from error
    try:
        content = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    return parse(content, source=str(path))


def parse(content: object, *, source: str = "config") -> Config:
    """Raises ConfigError. `content` is what the YAML file holds."""
    try:
        return TypeAdapter(Config).validate_python(content)
    except ValidationError as error:
        lines = [f"{source}: {line}" for line in _explained(error)]
        raise ConfigError("\n".join(lines)) from error


class _UniqueKeys(yaml.SafeLoader):
    """YAML lets a later key overwrite an earlier one in silence; here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice; keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _duration(value_ms: float | None) -> Duration | None:
    return None if value_ms is None else milliseconds(value_ms)


def _explained(error: ValidationError) -> Iterator[str]:
    for item in error.errors():
        # Pydantic names the branches of a union in the location; the file does not have them.
        path = ".".join(str(p) for p in item["loc"] if not re.search(r"[\[(]|^(int|literal)$", str(p)))
        if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            yield f"{path}: unknown key; {_near(path)}"
        elif item["type"] == "missing":
            yield f"{path}: missing; it must be given"
        elif path:
            message = item["msg"].removeprefix("Value error, ")
            shown = "" if isinstance(item["input"], dict) or "=" in message else f"={item['input']!r}"
            yield f"{path}{shown}: {message}"
        else:
            yield item["msg"].removeprefix("Value error, ")


def _near(path: str) -> str:
    *parents, key = path.split(".")
    known = _keys_at(Config, parents)
    guess = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {guess[0]!r}? " if guess else ""
    return f"{hint}known here: {', '.join(known)}"


def _keys_at(root: type, path: list[str]) -> list[str]:
    """Keys of the section that `path` leads to; list indices and names of map entries are passed over."""
    here: Any = root
    for step in path:
        stated = {f.name: f.type for f in fields(here)}
        if step in stated:
            here = _section_in(stated[step])
            if here is None:
                return []
    return [f.name for f in fields(here)]


def _section_in(kind: Any) -> Any:
    """The section in an annotation: itself, an optional one's, or a container's element's."""
    if is_dataclass(kind):
        return kind
    return next((found for part in get_args(kind) if (found := _section_in(part))), None)
