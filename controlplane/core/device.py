"""New."""

from typing import NamedTuple, Protocol

from controlplane.core.ports import EngineState


class DeviceReading(NamedTuple):
    """Bytes. `ours` are held by this process and those it started, `others` by everybody else."""

    total: int
    free: int
    ours: int
    others: int


class DeviceProbe(Protocol):
    @property
    def counts_untouched(self) -> bool:
        """Memory is held from its allocation on, not from its first use."""
        ...

    def read(self) -> DeviceReading: ...

    def close(self) -> None: ...


class DeviceMemory(Protocol):
    """Set the LLM's limit before its quota is raised, and after it is lowered ask for room."""

    @property
    def mode(self) -> str: ...

    @property
    def pool_bytes(self) -> int:
        """What both owners may take together."""
        ...

    @property
    def most_llm_bytes(self) -> int: ...

    def limit_llm(self, quota_bytes: int) -> None:
        """What the engine may map from now on; what it has mapped stays."""

    def workspace_room(self, engine: EngineState) -> int:
        """Bytes that the embedding workspace may take now, given what the engine has ceded."""
        ...


class LimitConflict(RuntimeError):
    """Somebody else moved the limit."""
