"""Memory that a simulation uses, over all of its steps."""

from dataclasses import dataclass


@dataclass(slots=True)
class MemoryUse:
    """Memory use over all steps.

    Attributes:
        peak: largest number of bytes in use.
        kv_area: byte-seconds of KV cache.
        workspace_area: byte-seconds of embedding workspace.
        overflows: steps that used more than the pool.
        failed_batches: embedding batches that failed for lack of memory.
    """

    peak: int = 0
    kv_area: float = 0.0
    workspace_area: float = 0.0
    overflows: int = 0
    failed_batches: int = 0

    def note(self, pool: int, kv: int, workspace: int, duration: float) -> None:
        """Counts a step of `duration` seconds that used so many bytes of KV cache and workspace."""
        self.peak = max(self.peak, kv + workspace)
        self.kv_area += kv * duration
        self.workspace_area += workspace * duration
        self.overflows += kv + workspace > pool
