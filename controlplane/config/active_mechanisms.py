"""States which mechanisms a configuration switches on, and which of its keys do nothing, with the reason.

A key counts as stated if its value differs from the default: a stated default cannot mislead. A key of
`scheduling.engine` that is left out has the value of the gate's key and is never reported.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields

from controlplane.config.live_keys import URGENCY_KEYS
from controlplane.config.root import Config
from controlplane.policy.engine.options import EngineOptions

_NOT_STATIC = ("srmt", "apt")
_STATIC = ("fcfs", "edf", "least-slack", "mc-sf")
_BUILT_IN = (*_STATIC, *_NOT_STATIC)
_STATIC_QUOTAS = (
    "quotas are static; they move with pool.kv_allocator: kvcached, unless scheduling.engine is off"
)
_SRMT_KEYS = (
    "preempt_ratio", "urgency", "settle_steps", "size_cutoff_share", "size_cutoff_window", "starvation_ms",
    "aged_share", "prefill_weight", "recompute_weight",
)  # fmt: skip
_RANK_KEYS = ("policy", "victims", "priority_head_start_ms", "default_deadline_ms")


@dataclass(frozen=True, slots=True)
class Idle:
    """Keys that do nothing while `holds` is true; NAME and [] stand for every entry of a section."""

    keys: tuple[str, ...]
    holds: Callable[[Config], bool]
    reason: str


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One mechanism of the service, whether it acts, and why (not)."""

    name: str
    is_active: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {'on' if self.is_active else 'off'}, {self.reason}"


def _engine(config: Config) -> str | None:
    """The ordering of the engine policy; None with vLLM's own scheduler."""
    options = config.engine_options()
    return None if options is None else options.ordering


def _has_both(config: Config) -> bool:
    return config.models.chat is not None and bool(config.models.encoders)


def _moves(config: Config) -> bool:
    return config.static_quota_reason() is None


def _one_priority(config: Config) -> bool:
    return len({section.priority for section in config.classes.values()}) == 1


def _no_tpot(config: Config) -> bool:
    return all(section.tpot_ms is None for section in config.classes.values())


IDLE: tuple[Idle, ...] = (
    Idle(
        ("quota.policy", "quota.llm.borrow", "quota.embedding.borrow"),
        lambda c: not _has_both(c),
        "only one kind of model is served",
    ),
    Idle(("quota.llm.nominal",), lambda c: c.models.chat is None, "no chat model is served"),
    Idle(
        ("quota.embedding.nominal",),
        lambda c: not c.models.encoders,
        "no embedding models or rerankers are served",
    ),
    Idle(
        ("quota.tick_ms", "quota.forecast.quantile", "quota.forecast.window_ms", "quota.llm.min",
         "quota.llm.lend", "quota.embedding.lend"),
        lambda c: not _moves(c),
        _STATIC_QUOTAS,
    ),
    Idle(
        ("quota.embedding.min",),
        lambda c: not _moves(c) and c.pool.kv_allocator == "static",
        _STATIC_QUOTAS,
    ),
    Idle(
        URGENCY_KEYS,
        lambda c: not _moves(c) or c.quota.policy == "static",
        "quotas do not follow urgency; they move with pool.kv_allocator: kvcached and quota.policy: auto",
    ),
    Idle(
        ("quota.forecast.window_ms",),
        lambda c: c.quota.forecast.quantile is None,
        "quota.forecast.quantile: null turns the forecast off",
    ),
    Idle(
        ("scheduling.engine.decode_pacing",),
        lambda c: not c.models.encoders,
        "no embedding models or rerankers are served that decode steps could wait for",
    ),
    Idle(
        tuple(f"scheduling.engine.{name}" for name in _SRMT_KEYS),
        lambda c: _engine(c) in _BUILT_IN and _engine(c) != "srmt",
        "only the engine ordering srmt uses it",
    ),
    Idle(
        ("scheduling.engine.missed_decay",),
        lambda c: _engine(c) in _BUILT_IN and _engine(c) != "apt",
        "only the engine ordering apt uses it",
    ),
    Idle(
        ("scheduling.engine.look_ahead",),
        lambda c: _engine(c) in ("mc-sf", *_NOT_STATIC),
        "only the engine orderings fcfs, edf and least-slack use it",
    ),
    Idle(
        tuple(f"scheduling.engine.{name}" for name in _RANK_KEYS),
        lambda c: _engine(c) in _NOT_STATIC,
        "the engine orderings srmt and apt have rules of their own",
    ),
    Idle(
        ("admission.policy",),
        lambda c: _engine(c) in _NOT_STATIC and not c.models.encoders,
        "the engine orderings srmt and apt manage the memory of the LLM by rules of their own",
    ),
    Idle(
        ("scheduling.victims",),
        lambda c: _engine(c) in _NOT_STATIC and not _moves(c),
        "the engine orderings srmt and apt choose victims by rules of their own",
    ),
    Idle(
        ("scheduling.options", "scheduling.engine.extra"),
        lambda c: c.scheduling.gate_ordering in _BUILT_IN and _engine(c) in (None, *_BUILT_IN),
        "no plug-in ordering is configured",
    ),
    Idle(
        ("scheduling.default_deadline_ms",),
        lambda c: c.scheduling.gate_ordering == "fcfs" and _engine(c) in (None, "fcfs", *_NOT_STATIC),
        "the order of arrival knows no deadlines",
    ),
    Idle(
        ("scheduling.engine.default_deadline_ms",),
        lambda c: _engine(c) == "fcfs",
        "the order of arrival knows no deadlines",
    ),
    Idle(
        ("scheduling.priority_head_start_ms", "scheduling.engine.priority_head_start_ms"),
        _one_priority,
        "all classes have the same priority",
    ),
    Idle(
        ("predictors.file", "predictors.encoder", "predictors.train_every_ms", "predictors.max_examples"),
        lambda c: c.admission.length_predictor != "learned" or c.models.chat is None,
        "output lengths are not learned; set admission.length_predictor: learned, with a chat model",
    ),
    Idle(
        ("admission.length_predictor", "admission.engine_queue", "admission.explore", "scheduling.engine",
         "scheduling.victims", "classes.NAME.tpot_ms", "classes.NAME.gap_ms"),
        lambda c: c.models.chat is None,
        "no chat model is served",
    ),
    Idle(
        ("admission.explore",),
        lambda c: _engine(c) is None,
        "with scheduling.engine: off no request is rejected by a forecast of the engine's queue",
    ),
    Idle(
        ("classes.NAME.weight",),
        lambda c: _engine(c) in (None, *_STATIC)
        and c.scheduling.gate_ordering in _BUILT_IN
        and not _has_both(c),
        "only the engine orderings srmt and apt, and the prices of embedding passes, use it",
    ),
    Idle(
        ("admission.tpot_guard",),
        lambda c: c.models.chat is None or _no_tpot(c),
        "no class has tpot_ms; it acts only on requests that state x-slo-tpot-ms",
    ),
    Idle(
        ("admission.defer_threshold_ms",),
        lambda c: not any(section.sheddable for section in c.classes.values()),
        "no class is sheddable",
    ),
    Idle(
        ("tenants.NAME.weight",),
        lambda c: len(c.tenants) == 1,
        "there is only one tenant",
    ),
    Idle(
        ("models.embeddings[].idle_cpu_priority", "models.rerankers[].idle_cpu_priority"),
        lambda c: c.models.chat is None
        or all((model.device or "").startswith("cuda") for model in c.models.encoders),
        "it yields CPU cores to a chat model, and no worker computes on a CPU or there is no chat model",
    ),
    Idle(
        tuple(
            f"models.{kind}[].mps_{key}"
            for kind in ("embeddings", "rerankers")
            for key in ("below_normal", "thread_percentage")
        ),
        lambda c: all((model.device or "").startswith("cpu") for model in c.models.encoders),
        "no worker computes on CUDA",
    ),
    Idle(
        ("models.embeddings[].options",),
        lambda c: all(model.backend == "sentence-transformers" for model in c.models.embeddings),
        "only plug-in backends take options",
    ),
    Idle(
        ("server.explain_requests",),
        lambda c: c.server.admin_key_sha256 is None and not c.server.is_local(),
        "/admin is disabled; set server.admin_key_sha256",
    ),
    Idle(
        ("decision_log.keep", "decision_log.sample"),
        lambda c: c.decision_log.dir is None,
        "nothing is logged; set decision_log.dir",
    ),
    Idle(
        ("tracing.sample", "tracing.service_name"),
        lambda c: c.tracing.endpoint is None,
        "nothing is traced; set tracing.endpoint",
    ),
)  # fmt: skip


def unused_keys(config: Config) -> list[str]:
    """One line for each key that has another value than its default and does nothing here."""
    found: dict[str, str] = {}
    for row in IDLE:
        if not row.holds(config):
            continue
        for key in row.keys:
            for path, value in _stated(config, None, key.split("."), ""):
                found.setdefault(path, f"{path}={value!r} does nothing: {row.reason}")
    return list(found.values())


def idle_keys(config: Config) -> dict[str, str]:
    """The reason of each key or section that does nothing here, stated or not; named as in `Idle`."""
    return {key: row.reason for row in reversed(IDLE) if row.holds(config) for key in row.keys}


def _stated(value: object, usual: object, keys: list[str], path: str) -> Iterator[tuple[str, object]]:
    """The values at `keys` that differ from their defaults, each with its path.

    `usual` is the default of the section `value`; None if the section has none.
    """
    key, *rest = keys
    name = key.removesuffix("[]")
    if name == "NAME" and isinstance(value, Mapping):
        for entry, section in value.items():
            yield from _stated(section, None, rest, f"{path}.{entry}")
        return
    if path == "scheduling.engine":
        usual = EngineOptions()
        inner = value.get(name, getattr(usual, name)) if isinstance(value, Mapping) else getattr(usual, name)
    else:
        inner = getattr(value, name)
    default = _default(value, name) if usual is None else getattr(usual, name)
    here = f"{path}.{name}".lstrip(".")
    if key.endswith("[]") and isinstance(inner, tuple):
        for index, item in enumerate(inner):
            yield from _stated(item, None, rest, f"{here}.{index}")
    elif rest:
        yield from _stated(inner, default, rest, here)
    elif inner != default:
        yield here, inner


def _default(section: object, name: str) -> object:
    """The default of a field; None if it must be stated."""
    field = next(known for known in fields(section) if known.name == name)  # type: ignore[arg-type]
    if field.default is not MISSING:
        return field.default
    return None if field.default_factory is MISSING else field.default_factory()


def mechanisms(config: Config) -> list[Mechanism]:
    """All mechanisms, those that are off included."""
    return [*_of_generation(config), *_of_sharing(config), *_of_tenants(config)]


def _of_generation(config: Config) -> Iterator[Mechanism]:
    admission, chat, engine = config.admission, config.models.chat, config.engine_options()
    yield Mechanism("admission", True, f"admission.policy: {admission.policy}")
    if chat is None:
        for name in ("engine ordering", "preemption", "TPOT guard", "length prediction", "prefix caching"):
            yield Mechanism(name, False, "no chat model is served")
        return
    own = "scheduling.engine: off; vLLM's own scheduler runs in the gate's order, with static quotas only"
    ordering = own if engine is None else f"scheduling.engine.ordering: {engine.ordering}"
    yield Mechanism("engine ordering", engine is not None, ordering)
    equal = _one_priority(config)
    yield Mechanism("preemption", not equal, "all classes have the same priority" if equal else "by priority")
    guard = f"admission.tpot_guard: {str(admission.tpot_guard).lower()}"
    no_tpot = _no_tpot(config)
    yield Mechanism(
        "TPOT guard", admission.tpot_guard and not no_tpot, "no class has tpot_ms" if no_tpot else guard
    )
    yield Mechanism("length prediction", True, f"admission.length_predictor: {admission.length_predictor}")
    caches = chat.engine.get("enable_prefix_caching", True) is not False
    is_stated = "enable_prefix_caching" in chat.engine
    why = "models.chat.engine.enable_prefix_caching" if is_stated else "vLLM's default for the model"
    yield Mechanism("prefix caching", caches, why)


def _of_sharing(config: Config) -> Iterator[Mechanism]:
    quota, engine, static = config.quota, config.engine_options(), config.static_quota_reason()
    if not _has_both(config) or engine is None:
        why = "needs a chat model, embedding models or rerankers, and scheduling.engine"
        yield Mechanism("decode pacing", False, why)
    else:
        pacing = f"scheduling.engine.decode_pacing: {engine.decode_pacing:g}"
        yield Mechanism("decode pacing", engine.decode_pacing > 0, pacing)
    both = "by the SLOs that each pass meets and breaks" if _has_both(config) else None
    yield Mechanism("priced embedding passes", both is not None, both or "only one kind of model is served")
    why = "embedding calls whose time is worth more to generations are rejected"
    yield Mechanism("price of time", both is not None, why if both else "only one kind of model is served")
    yield Mechanism("moving quotas", static is None, static or f"quota.policy: {quota.policy}")
    quantile = quota.forecast.quantile
    why = static or f"quota.forecast.quantile: {quantile}"
    yield Mechanism("load forecast", static is None and quantile is not None, why)
    monitor = config.pool.monitor_ms
    yield Mechanism("memory monitor", monitor > 0, f"pool.monitor_ms: {monitor:g}")


def _of_tenants(config: Config) -> Iterator[Mechanism]:
    tenants = config.tenants.values()
    count = f"{len(tenants)} configured"
    yield Mechanism("tenants", bool(tenants), count)
    is_fair = len(tenants) > 1 and any(tenant.weight is not None for tenant in tenants)
    why = "tenants.NAME.weight" if is_fair else "no two tenants with weights"
    yield Mechanism("fair queueing", is_fair, why)
    limited = any(tenant.requests_per_minute or tenant.tokens_per_minute for tenant in tenants)
    yield Mechanism("rate limits", limited, "of tenants" if limited else "no tenant has one")
