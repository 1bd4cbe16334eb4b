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
        self._before = 0
        self._most_kept: int | None = None

    def keeps_at_most_this(self) -> None:
        """From now on."""
        self._most_kept = torch.cuda.memory_reserved(self._device)

    def begin(self) -> None:
        """A pass."""
        self._before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def taken(self) -> int:
        """By the pass at its height."""
        return int(torch.cuda.max_memory_allocated(self._device) - self._before)

    def kept(self) -> int:
        """Of all passes and the model."""
        found: int = torch.cuda.memory_reserved(self._device)
        if self._most_kept is None or found <= self._most_kept:
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
