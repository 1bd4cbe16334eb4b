"""Memory of passes on a simulated CUDA caching allocator."""

import pytest
import torch

from backends.embedding.cuda_allocator import CudaMemory
from backends.embedding.encoder import is_out_of_memory
from backends.embedding.profiling import memory_points, time_points

pytestmark = pytest.mark.engine

SEGMENT = 20
WEIGHTS = 100
DEVICE = torch.device("cuda:0")


class Allocator:
    """Reuses a free segment only for a request of exactly its size."""

    def __init__(self) -> None:
        self.kept: set[int] = set()
        self.peak = self.most_reserved = WEIGHTS

    def run(self, size: int) -> None:
        """A pass that allocates `size` bytes and frees them."""
        self.kept.add(-(-size // SEGMENT) * SEGMENT)
        self.peak = max(self.peak, WEIGHTS + size)
        self.most_reserved = max(self.most_reserved, self.memory_reserved())

    def memory_allocated(self, device=None):
        return WEIGHTS

    def max_memory_allocated(self, device=None):
        return self.peak

    def memory_reserved(self, device=None):
        return WEIGHTS + sum(self.kept)

    def max_memory_reserved(self, device=None):
        return self.most_reserved

    def reset_peak_memory_stats(self, device=None):
        self.peak, self.most_reserved = WEIGHTS, self.memory_reserved()

    def empty_cache(self):
        self.kept.clear()

    def synchronize(self, device=None):
        pass


@pytest.fixture
def allocator(monkeypatch):
    allocator = Allocator()
    monkeypatch.setattr(torch, "cuda", allocator)
    return allocator


def test_a_profiled_pass_counts_whole_segments_and_reuses_none(allocator):
    points = memory_points(
        lambda inputs, length: allocator.run(inputs * length), DEVICE, longest=8, pass_tokens=30
    )
    assert [(p.tokens, p.peak_bytes) for p in points] == [(8, 20), (24, 40)]


def test_peak_and_reserved_bytes_of_a_pass(allocator):
    memory = CudaMemory(DEVICE)
    memory.begin_pass()
    allocator.run(30)
    assert (memory.pass_peak_bytes(), memory.trim_reserved()) == (30, 140)


def test_reserved_bytes_stay_within_the_cap(allocator):
    memory = CudaMemory(DEVICE)
    allocator.run(60)
    memory.cap_reserved()
    for size, kept in ((60, 160), (41, 160), (30, 100), (30, 140), (20, 160), (50, 100)):
        memory.begin_pass()
        allocator.run(size)
        assert memory.trim_reserved() == kept, size


def test_profiled_passes_of_several_inputs_fit_a_batch():
    seen = set()
    time_points(lambda n, length: seen.add((n, length)), DEVICE, longest=512, batch_tokens=1_024)
    assert (1, 512) in seen and (2, 512) in seen
    assert max(n * length for n, length in seen) == 1_024


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_out_of_memory_errors_of_cuda_libraries_are_recognized(message, expected):
    assert is_out_of_memory(RuntimeError(message)) is expected
