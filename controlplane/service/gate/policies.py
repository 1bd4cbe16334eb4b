"""The gate's policies, as a configuration names them."""

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.config import Config
from controlplane.core.ports import Generator
from controlplane.policy.engine.cutoff_at_gate import EnginePrecedence
from controlplane.policy.gate.admission import Admission
from controlplane.policy.gate.ordering import Ordering
from controlplane.policy.registry import engine_precedence
from controlplane.service.gate.rate_limits import TenantLimits


@dataclass(frozen=True, slots=True)
class Policies:
    """The gate's policies.

    `engine_queue` is how many requests may be forwarded to an LLM engine beyond its free slots.
    `engine_precedence(a, b)` is true if the engine starts `a` before `b`; None if it uses its own scheduler.
    """

    admission: Admission
    ordering: Ordering
    engine_queue: int
    engine_precedence: EnginePrecedence | None = None


def policies_of(config: Config, generators: Iterable[Generator]) -> Policies:
    """The policies that a configuration names, for engines with or without a scheduler of their own."""
    has_own = all(generator.has_own_scheduler for generator in generators)
    engine, queue = config.engine_options() if has_own else None, config.admission.engine_queue
    return Policies(
        config.admission_policy(),
        config.ordering_policy(),
        queue if queue is not None else 64 if engine is None else 1_000,
        None if engine is None else engine_precedence(engine),
    )


def tenant_limits(config: Config) -> dict[str, TenantLimits]:
    """The rate limits of each tenant."""
    return {
        name: TenantLimits(tenant.requests_per_minute, tenant.tokens_per_minute)
        for name, tenant in config.tenants.items()
    }


def tenant_weights(config: Config) -> dict[str, float]:
    """The weights of all tenants, 1 by default; empty if no tenant states one, which turns fairness off."""
    stated = {name: tenant.weight for name, tenant in config.tenants.items()}
    is_any = any(weight is not None for weight in stated.values())
    return {name: weight or 1.0 for name, weight in stated.items()} if is_any else {}
