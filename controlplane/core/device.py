"""Protocols for reading and limiting device memory."""

from typing import NamedTuple, Protocol

from controlplane.core.engine_reports import EngineState


class DeviceReading(NamedTuple):
    """Memory in bytes: `own_bytes` by this process and its children, `other_bytes` by all other processes."""

    total: int
    free: int
    own_bytes: int
    other_bytes: int


class DeviceProbe(Protocol):
    """Reads the memory of one device."""

    @property
    def counts_reserved_memory(self) -> bool:
        """Whether memory counts as used from its allocation on, not from its first use."""
        ...

    def read(self) -> DeviceReading:
        """Current reading."""
        ...

    def close(self) -> None:
        """Releases the driver's handle."""
        ...


class DeviceMemory(Protocol):
    """Divides device memory between the LLM's KV cache and the embedding workspace.

    Set the LLM's limit before its quota is raised; after it is lowered, ask for room.
    """

    @property
    def mode(self) -> str:
        """Name of the mechanism."""
        ...

    @property
    def pool_bytes(self) -> int:
        """Bytes that both owners may hold together."""
        ...

    @property
    def max_llm_bytes(self) -> int:
        """Largest quota that the LLM can get."""
        ...

    def limit_llm(self, quota_bytes: int) -> None:
        """Limits what the engine may map from now on; mapped memory stays mapped."""

    def engine_restarted(self) -> None:
        """Forgets the limit, which ended with the engine; set it again."""

    def workspace_room(self, engine: EngineState) -> int:
        """Bytes that the embedding workspace may take now, given what the engine has ceded."""
        ...


class LimitConflict(RuntimeError):
    """Another process changed the limit."""
