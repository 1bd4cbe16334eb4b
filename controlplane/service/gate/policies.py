"""The gate's policies, as a configuration names them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controlplane.config import Config
from controlplane.core.ports import Generator
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.gate.admission import Admission
from controlplane.policy.gate.ordering import Ordering
from controlplane.service.gate.rate_limits import TenantLimits
from controlplane.service.request_jobs import RequestTerms


@dataclass(frozen=True, slots=True)
class Policies:
    """The gate's policies: all that it takes from one version of the configuration, replaced as one object.

    `version` is the number of that version, and `explained_requests` how many ended requests are remembered.
    `engine_queue` is how many requests may be forwarded to an LLM engine beyond its free slots.
    `engine_options` are those of the engine's policy; None if vLLM's own scheduler runs.
    """

    admission: Admission
    ordering: Ordering
    engine_queue: int
    engine_options: EngineOptions | None
    version: int
    explained_requests: int
    tenant_limits: Mapping[str, TenantLimits]
    tenant_weights: Mapping[str, float]


def policies_of(config: Config, generators: Iterable[Generator], *, version: int = 1) -> Policies:
    """The policies that a configuration names, for engines with or without Tandem's scheduler."""
    has_scheduler = all(generator.has_tandem_scheduler for generator in generators)
    engine, queue = config.engine_options() if has_scheduler else None, config.admission.engine_queue
    return Policies(
        config.admission_policy(),
        config.ordering_policy(),
        queue if queue is not None else 64 if engine is None else 1_000,
        engine,
        version,
        config.server.explain_requests,
        _tenant_limits(config),
        _tenant_weights(config),
    )


def terms_of(config: Config) -> RequestTerms:
    """What a configuration states for the requests that arrive under it."""
    limits = config.server.limits
    return RequestTerms(
        config.service_classes(), config.default_class(), limits.max_answer_values, limits.max_pair_tokens
    )


def _tenant_limits(config: Config) -> dict[str, TenantLimits]:
    return {
        name: TenantLimits(tenant.requests_per_minute, tenant.tokens_per_minute)
        for name, tenant in config.tenants.items()
    }


def _tenant_weights(config: Config) -> dict[str, float]:
    """The weights of all tenants, 1 by default; empty if no tenant states one, which turns fairness off."""
    stated = {name: tenant.weight for name, tenant in config.tenants.items()}
    is_any = any(weight is not None for weight in stated.values())
    return {name: weight or 1.0 for name, weight in stated.items()} if is_any else {}
