"""The quota and the use ceiling of an LLM engine: what it has confirmed, and what it may use until then."""

from dataclasses import dataclass, field

from controlplane.core.device import DeviceMemory
from controlplane.core.engine_reports import EngineState
from controlplane.core.errors import BackendFailed, Refused
from controlplane.core.ports import Generator
from controlplane.service.runtime.engine_control import await_engine


@dataclass(eq=False, slots=True)
class EngineQuota:
    """Orders an engine's quota, and keeps the limit of its memory above what it may use.

    `quota` is the one that the engine confirmed last or reports. `ceiling` is the most that it may use: the
    use ceiling that it confirmed last or reports, or a larger one that it has not confirmed yet.
    """

    generator: Generator
    memory: DeviceMemory
    quota: int = field(init=False)
    ceiling: int = field(init=False)

    def __post_init__(self) -> None:
        self.quota = self.ceiling = self.memory.max_llm_bytes

    def reported(self, state: EngineState) -> None:
        """Follows a report: a restarted engine uses its whole cache; after a failure its quota is unknown."""
        self.quota = max(self.quota, state.quota_bytes or 0)
        self.ceiling = max(self.ceiling, state.use_ceiling_bytes or 0)

    async def set(self, quota: int, ceiling: int) -> None:
        """Sends the engine a quota and a use ceiling, and returns once it has confirmed them.

        Raises EngineTimeout if it does not confirm; it may then apply them now or later. Raises Refused or
        BackendFailed if it does not apply them.
        """
        memory, generator, former = self.memory, self.generator, self.ceiling
        # The memory limit is never below the ceiling.
        memory.limit_llm(max(ceiling, former))
        self.ceiling = max(ceiling, former)
        try:
            await await_engine(generator.set_quota(quota, use_ceiling_bytes=ceiling), generator, "quota")
        except (Refused, BackendFailed):
            self.ceiling = former
            memory.limit_llm(former)
            raise
        self.quota, self.ceiling = quota, ceiling
        if ceiling < former:
            memory.limit_llm(ceiling)
