"""CUDA memory of embedding passes: peak use, and a cap on what PyTorch's caching allocator keeps.

The allocator reserves whole segments and keeps freed ones for later allocations of similar size. It may keep
as much as the largest profiled pass left reserved. More than that is fragmented, so few passes can reuse it,
while other processes on the device may fail without it; the excess is released after the pass.
"""

from collections.abc import Callable

import torch


class CudaMemory:
    """Measures one pass at a time on a CUDA device and trims the allocator's cache."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated_before = 0
        self._max_reserved: int | None = None

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator has reserved."""
        return int(torch.cuda.memory_reserved(self._device))

    def cap_reserved(self) -> None:
        """Makes the bytes reserved now the most that is kept after later passes."""
        self._max_reserved = self.reserved_bytes

    def begin_pass(self) -> None:
        """Resets the peak before a pass."""
        self._allocated_before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def pass_peak_bytes(self) -> int:
        """Peak of the bytes allocated since `begin_pass`, above those allocated then."""
        return int(torch.cuda.max_memory_allocated(self._device) - self._allocated_before)

    def trim_reserved(self) -> int:
        """Empties the allocator's cache if it exceeds the cap; returns the bytes reserved afterwards."""
        if self._max_reserved is not None and self.reserved_bytes > self._max_reserved:
            torch.cuda.empty_cache()
        return self.reserved_bytes


def peak_bytes(compute: Callable[[int, int], object], device: torch.device, inputs: int, length: int) -> int:
    """Bytes that the device loses to one pass, in whole allocator segments."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    compute(inputs, length)
    return int(torch.cuda.max_memory_reserved(device) - before)
