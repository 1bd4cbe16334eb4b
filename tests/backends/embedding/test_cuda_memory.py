"""PyTorch's allocator on a device, played: what a pass takes in whole segments, and what stays taken."""

import pytest
import torch

from backends.embedding.cuda_memory import CudaMemory
from backends.embedding.encoder import is_out_of_memory
from backends.embedding.profiling import memory_points, time_points

pytestmark = pytest.mark.engine

SEGMENT = 20
WEIGHTS = 100
DEVICE = torch.device("cuda:0")


class Allocator:
    """Serves a request from a free segment of that size alone, as far as passes of other shapes go."""

    def __init__(self) -> None:
        self.kept: set[int] = set()
        self.peak = self.most_reserved = WEIGHTS

    def run(self, size: int) -> None:
        """A pass that takes `size` and frees it."""
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
    played = Allocator()
    monkeypatch.setattr(torch, "cuda", played)
    return played


def test_a_measured_pass_takes_whole_segments_and_none_of_an_earlier_one(allocator):
    points = memory_points(
        lambda inputs, length: allocator.run(inputs * length), DEVICE, longest=8, pass_tokens=30
    )
    assert [(p.tokens, p.peak_bytes) for p in points] == [(8, 20), (24, 40)]


def test_what_a_pass_took_is_told_with_what_is_kept(allocator):
    memory = CudaMemory(DEVICE)
    memory.begin_pass()
    allocator.run(30)
    assert (memory.pass_peak_bytes(), memory.trim_reserved()) == (30, 140)


def test_no_more_is_kept_than_the_largest_measured_pass_left(allocator):
    memory = CudaMemory(DEVICE)
    allocator.run(60)
    memory.cap_reserved()
    for size, kept in ((60, 160), (41, 160), (30, 100), (30, 140), (20, 160), (50, 100)):
        memory.begin_pass()
        allocator.run(size)
        assert memory.trim_reserved() == kept, size


def test_no_timed_pass_of_several_inputs_is_larger_than_a_batch():
    seen = set()
    time_points(lambda n, length: seen.add((n, length)), DEVICE, longest=512, batch_tokens=1_024)
    assert (1, 512) in seen and (2, 512) in seen
    assert max(n * length for n, length in seen) == 1_024


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_libraries_on_the_device_say_it_their_way_that_memory_ran_out(told, expected):
    assert is_out_of_memory(RuntimeError(told)) is expected
