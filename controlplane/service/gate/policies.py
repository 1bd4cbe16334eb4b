"""The gate's policies, as a configuration names them."""

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.config import Config
from controlplane.core.ports import Generator
from controlplane.policy.engine.cutoff_at_gate import EnginePrecedence
from controlplane.policy.gate.admission import Admission
from controlplane.policy.gate.ordering import Ordering
from controlplane.policy.registry import engine_precedence


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
