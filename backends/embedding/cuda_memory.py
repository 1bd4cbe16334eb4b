"""What does a pass take of a CUDA device, and what stays taken?

PyTorch's allocator takes whole segments and keeps what a pass frees, for later ones of like shapes. Rule: it
may keep as much as the largest measured pass left. What is more lies scattered where few passes find room,
and is missed by others on the device, who do not always outlive that; it goes back after the pass.
"""

from collections.abc import Callable

import torch


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated_before = 0
        self._max_reserved: int | None = None

    def cap_reserved(self) -> None:
        """From now on."""
        self._max_reserved = torch.cuda.memory_reserved(self._device)

    def begin_pass(self) -> None:
        """A pass."""
        self._allocated_before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def pass_peak_bytes(self) -> int:
        """By the pass at its height."""
        return int(torch.cuda.max_memory_allocated(self._device) - self._allocated_before)

    def trim_reserved(self) -> int:
        """Of all passes and the model."""
        found: int = torch.cuda.memory_reserved(self._device)
        if self._max_reserved is None or found <= self._max_reserved:
            return found
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved(self._device))


def peak_bytes(compute: Callable[[int, int], object], device: torch.device, inputs: int, length: int) -> int:
    """That the device loses to a pass, in whole segments."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    compute(inputs, length)
    return int(torch.cuda.max_memory_reserved(device) - before)
