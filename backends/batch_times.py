"""How long does one engine step take on hardware that is not here? Fits to measured profiles.

`opt_13b_a100` is DistServe's fit of vLLM serving OPT-13B on one A100-80GB (profiler-a100-80g, vllm, TP 1):
milliseconds, with another line from 95 decoding requests on. An A100-40GB has 1,555 instead of 2,039
GB/s; decoding is bound by bandwidth, prefill by arithmetic, which is the same: `opt_13b_a100_40g`
scales the decoding part by 1.311.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Batch:
    """`prefill_pairs` sums c^2 - (c - n)^2 over prompts of which n tokens up to position c are read;
    `cells` are those that decoding requests read."""

    prefill_tokens: int = 0
    prefill_pairs: int = 0
    decodes: int = 0
    cells: int = 0

    def add(self, computed: int, new: int, *, is_decode: bool) -> None:
        end = computed + new
        if is_decode:
            self.decodes += 1
            self.cells += end
        else:
            self.prefill_tokens += new
            self.prefill_pairs += end * end - computed * computed


BatchTime = Callable[[Batch], float]
"""Seconds."""

_BANDWIDTH_40G = 2_039 / 1_555


def opt_13b_a100(batch: Batch, bandwidth: float = 1.0) -> float:
    if batch.decodes == 0:
        base = 22.0522
    elif batch.decodes < 95:
        base = bandwidth * (23.4750 + 0.0607269 * batch.decodes + 0.000592934 * batch.cells)
    else:
        base = bandwidth * (20.2064 + 0.1200031 * batch.decodes + 0.000490773 * batch.cells)
    return (base + 0.140509 * batch.prefill_tokens + 8.0766e-6 * batch.prefill_pairs) / 1e3


def opt_13b_a100_40g(batch: Batch) -> float:
    return opt_13b_a100(batch, _BANDWIDTH_40G)


def instant(batch: Batch) -> float:
    """For tests of counts and order alone."""
    return 0.0


BATCH_TIMES: Mapping[str, BatchTime] = {
    "opt-13b-a100-80g": opt_13b_a100,
    "opt-13b-a100-40g": opt_13b_a100_40g,
    "instant": instant,
}
