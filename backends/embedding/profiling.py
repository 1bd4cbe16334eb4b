"""Measures time and memory of passes of a loaded model at startup.

Pass sizes grow until one takes more than half a second, so that a large model on a slow device starts in
reasonable time. On a CPU with one thread the clock is the thread's CPU time, which other processes do not
distort. Memory is the allocator's peak on CUDA and the process's peak resident size on Linux; elsewhere it is
not measured (None).
"""

import ctypes
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from backends.embedding import cuda_allocator
from backends.embedding.memory_model import MemoryPoint
from backends.embedding.time_model import TimePoint

_MAX_PASS_SECONDS = 0.5
_REPEATS = 3

Compute = Callable[[int, int], object]
"""Runs one pass of (inputs, tokens each)."""


def time_points(
    compute: Compute, device: torch.device, *, longest: int, batch_tokens: int
) -> list[TimePoint]:
    """Durations of passes of growing size.

    Args:
        compute: runs one pass.
        device: device that computes.
        longest: tokens of the longest input.
        batch_tokens: largest pass of several inputs, in padded tokens.
    """
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter

    def seconds(inputs: int, length: int) -> float:
        start = clock()
        compute(inputs, length)
        return clock() - start

    shapes = {(1, min(8, longest)), (1, min(64, longest)), (8, min(8, longest)), (8, min(64, longest))}
    shapes |= {(1, length) for length in (256, 1_024, 4_096) if length < longest}
    shapes |= {(1, longest), (4, longest)}
    if device.type != "cpu":
        # A GPU shows its cost per token only when it is fully occupied.
        shapes |= {(max(1, batch_tokens // length), length) for length in {min(64, longest), longest}}
    # A pass larger than any batch may not fit into memory.
    shapes = {(n, length) for n, length in shapes if n == 1 or n * length <= batch_tokens}
    points: list[TimePoint] = []
    seconds(1, min(8, longest))
    for inputs, length in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape)):
        points.append(TimePoint(inputs, length, min(seconds(inputs, length) for _ in range(_REPEATS))))
        if points[-1].seconds > _MAX_PASS_SECONDS:
            break
    return points


def memory_points(
    compute: Compute, device: torch.device, *, longest: int, pass_tokens: int
) -> list[MemoryPoint] | None:
    """Peak bytes of passes up to `pass_tokens`, or None where they cannot be measured.

    Raises torch.OutOfMemoryError if the largest pass does not fit.
    """
    lengths = sorted({min(8, longest), min(64, longest), longest})
    shapes = {(1, lengths[0]), *((max(1, pass_tokens // length), length) for length in lengths)}
    if device.type == "cuda":
        peak = cuda_allocator.peak_bytes
    elif device.type == "cpu" and _reset_resident_peak():
        peak = _resident_peak_bytes
    else:
        return None
    ordered = sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))
    return [MemoryPoint(n, length, peak(compute, device, n, length)) for n, length in ordered]


def _resident_peak_bytes(compute: Compute, device: torch.device, inputs: int, length: int) -> int:
    # Memory freed by earlier passes would be reused and hide the growth, so it is returned first.
    trim_heap()
    _reset_resident_peak()
    before = _status_bytes("VmRSS")
    compute(inputs, length)
    return max(0, _status_bytes("VmHWM") - before)


def trim_heap() -> None:
    """Returns freed heap memory to the system if the C library has `malloc_trim`."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _reset_resident_peak() -> bool:
    """Resets VmHWM by writing 5 to clear_refs (proc(5)).

    False if the system has no such file, or no `malloc_trim`.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return hasattr(ctypes.CDLL(None), "malloc_trim")


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text("ascii"), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}; resident memory cannot be measured here")
    return 1_024 * int(found[1])
