"""The whole configuration: all sections, and the rules that hold between them."""

from collections.abc import Mapping
from dataclasses import field

from pydantic.dataclasses import dataclass as section

from controlplane.config.admission_and_scheduling import AdmissionSection, SchedulingSection
from controlplane.config.classes_section import ClassSection
from controlplane.config.decision_log_section import DecisionLogSection
from controlplane.config.fields import STRICT, Name
from controlplane.config.log_section import LogSection
from controlplane.config.models_section import ModelsSection
from controlplane.config.pool_and_quota import PoolSection, QuotaSection
from controlplane.config.predictors_section import PredictorsSection
from controlplane.config.server_and_tenants import ServerSection, TenantSection
from controlplane.config.tracing_section import TracingSection
from controlplane.core.clock import milliseconds
from controlplane.core.slo import ServiceClass
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.gate.admission import Admission, AdmissionOptions
from controlplane.policy.gate.ordering import Ordering, OrderingOptions
from controlplane.policy.registry import ADMISSIONS, VICTIMS, engine_policy, gate_ordering, lookup


def _standard_class() -> dict[str, ClassSection]:
    return {"standard": ClassSection(default=True, sheddable=False)}


@section(frozen=True, config=STRICT)
class Config:
    """The contents of one YAML file; only `models` is required."""

    models: ModelsSection
    """The models to serve."""
    server: ServerSection = ServerSection()
    """The HTTP server."""
    pool: PoolSection = PoolSection()
    """The memory to divide."""
    classes: Mapping[Name, ClassSection] = field(default_factory=_standard_class)
    """Service classes by name; by default one class `standard` without objectives."""
    tenants: Mapping[Name, TenantSection] = field(default_factory=dict)
    """Tenants by name; without tenants no API key is needed."""
    admission: AdmissionSection = AdmissionSection()
    """Decisions of the gate."""
    predictors: PredictorsSection = PredictorsSection()
    """The output-length predictor."""
    quota: QuotaSection = QuotaSection()
    """Shares of the pool."""
    scheduling: SchedulingSection = SchedulingSection()
    """Order of requests."""
    log: LogSection = LogSection()
    """Form and level of log lines, and the access log."""
    decision_log: DecisionLogSection = DecisionLogSection()
    """The log of decisions."""
    tracing: TracingSection = TracingSection()
    """Traces of requests."""

    def __post_init__(self) -> None:
        defaults = [name for name, c in self.classes.items() if c.default]
        if len(defaults) != 1:
            raise ValueError(
                f"classes: exactly one class is the default, not {len(defaults)} "
                f"({', '.join(defaults) or 'none'}); set `default: true` in exactly one"
            )
        if not (self.tenants or self.server.open or self.server.is_local()):
            raise ValueError(
                f"server.host={self.server.host!r}: other machines reach this address, so clients need keys; "
                "configure tenants, or set server.open: true to serve clients without a key"
            )
        holders: dict[str, str] = {}
        for tenant, settings in self.tenants.items():
            for digest in settings.api_keys_sha256:
                if (other := holders.setdefault(digest, tenant)) != tenant:
                    raise ValueError(
                        f"tenants.{tenant}.api_keys_sha256={digest!r}: also a key of tenants.{other}; "
                        "a key belongs to one tenant, so remove it from one of them"
                    )
            unknown = sorted(set(settings.classes or ()) - set(self.classes))
            if unknown:
                raise ValueError(
                    f"tenants.{tenant}.classes={unknown[0]!r}: no such class; "
                    f"choose from {', '.join(sorted(self.classes))}"
                )
        known = [model.served_name for model in self.models.embeddings]
        if self.predictors.encoder not in (None, *known):
            raise ValueError(
                f"predictors.encoder={self.predictors.encoder!r}: no such embedding model; "
                f"models.embeddings has {', '.join(known) or 'none'}"
            )
        if self.models.chat is not None and self.models.encoders:
            self.quota.require_room_for_both()
            if self.quota.must_move and (reason := self.static_quota_reason()) is not None:
                raise ValueError(
                    f"quota: quotas cannot change, {reason}; change that, or remove quota.policy and borrow"
                )
        self.admission_policy()
        self.ordering_policy()
        self.engine_options()

    def service_classes(self) -> dict[str, ServiceClass]:
        """The service classes by name."""
        return {name: c.service_class(name) for name, c in self.classes.items()}

    def default_class(self) -> str:
        """The class of requests that name none."""
        return next(name for name, c in self.classes.items() if c.default)

    def admission_policy(self) -> Admission:
        """Builds the gate's admission policy. Raises ValueError for an unknown policy or a bad option."""
        a = self.admission
        options = AdmissionOptions(
            a.max_waiting,
            milliseconds(a.max_wait_ms),
            milliseconds(a.defer_threshold_ms),
            tpot_guard=a.tpot_guard,
            explore=a.explore,
        )
        fits = lookup("admission", ADMISSIONS, a.policy, setting="admission.policy")
        victims = lookup("victims", VICTIMS, self.scheduling.victims, setting="scheduling.victims")
        return Admission(options, fits, victims)

    def ordering_policy(self) -> Ordering:
        """Builds the order of the gate's waiting queues. Raises ValueError for an unknown ordering."""
        s = self.scheduling
        options = OrderingOptions(
            milliseconds(s.priority_head_start_ms), milliseconds(s.default_deadline_ms), s.options
        )
        return gate_ordering(s.gate_ordering, options)

    def engine_options(self) -> EngineOptions | None:
        """Options of the engine policy: the gate's values, overridden by `scheduling.engine`.

        None with vLLM's own scheduler. Raises ValueError for an unknown option or a bad value.
        """
        a, s = self.admission, self.scheduling
        if s.engine is None:
            return None
        shared = {
            "ordering": s.ordering or EngineOptions().ordering,
            "victims": s.victims,
            "extra": s.options,
            "policy": a.policy,
            "priority_head_start_ms": s.priority_head_start_ms,
            "default_deadline_ms": s.default_deadline_ms,
        }
        try:
            options = EngineOptions().changed({**shared, **s.engine})
            engine_policy(options)
        except ValueError as error:
            raise ValueError(f"scheduling.engine: {error}") from error
        return options

    def static_quota_reason(self) -> str | None:
        """The reason that quotas do not change at run time; None if they do."""
        quota, chat = self.quota, self.models.chat
        if chat is None or not self.models.encoders:
            return "only one kind of model is served"
        if quota.policy == "static" and not quota.must_move:
            return "quota.policy: static"
        if self.scheduling.engine is None and chat.backend == "vllm":
            return "scheduling.engine: off; vLLM's own scheduler enforces no quota"
        if self.pool.kv_allocator == "static":
            return "pool.kv_allocator: static cannot give KV memory back"
        return None
