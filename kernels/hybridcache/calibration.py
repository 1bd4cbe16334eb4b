"""Measures what a cached token and a request cost per decode step and layer, for each form of the cache.

The forms are timed alternately at several context lengths, so that a drift of the machine affects all of them
equally. A line through the medians separates the cost of a token from that of a request.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from time import perf_counter

import torch

from hybridcache import decode, ops
from hybridcache.layout import BlockLayout, HeldTokens, Projection, Rotary


@dataclass(frozen=True, slots=True)
class CalibrationSetup:
    """Shapes and repetitions of a calibration.

    Attributes:
        layout: block layout of the model.
        dtype: dtype of the cache.
        device: device to measure on.
        requests: requests in the batch.
        contexts: context lengths to measure, in tokens per request.
        repeats: runs per form and context.
        rotary: whether keys are rotated; they cannot be absorbed then, and `m2` is left out.
        flushed_bytes: bytes written on a GPU before each run. The write clears the GPU's cache, and while it
            runs all kernels are launched, so that only their execution is timed. With 0 the launches are
            timed as well, as in an engine's step.
    """

    layout: BlockLayout
    dtype: torch.dtype
    device: torch.device
    requests: int
    contexts: Sequence[int]
    repeats: int
    rotary: bool
    flushed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one layer in one decode step; `seconds` has the median of each context length."""

    seconds_per_token: float
    seconds_per_request: float
    seconds: tuple[float, ...]


DecodeStep = Callable[[int], torch.Tensor]
"""Runs one decode step at a context length."""


FORMS = ("kv", "m0", "m1", "m2")


def measure(setup: CalibrationSetup, forms: Collection[str] = FORMS) -> dict[str, Cost]:
    """Measures the cost of each form.

    `kv` is the plain cache; `m0` restores keys and values, `m1` only keys, `m2` nothing (see `decode`).
    """
    ways = {name: way for name, way in decode_variants(setup).items() if name in forms}
    flushed = torch.empty(setup.flushed_bytes, dtype=torch.uint8, device=setup.device)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for context in setup.contexts:
        for way in ways.values():
            way(context)
        rounds = [
            {name: _seconds(partial(way, context), flushed) for name, way in ways.items()}
            for _ in range(setup.repeats)
        ]
        for name, medians in taken.items():
            medians.append(median(seconds[name] for seconds in rounds))
    return {name: _fit_line(setup, medians) for name, medians in taken.items()}


def added_cost(setup: CalibrationSetup, form: str, many: int) -> tuple[float, float, float]:
    """Seconds that a token, a request and a step cost more in `form` than as keys and values, for one layer.

    The cost per step follows from the difference between batches of `setup.requests` and `many` requests.
    """
    few = measure(setup, [form])[form]
    both = measure(replace(setup, requests=many), ["kv", form])
    return cost_differences(setup.requests, few, many, both[form], both["kv"])


def cost_differences(
    few: int, of_few: Cost, many: int, of_many: Cost, plain: Cost
) -> tuple[float, float, float]:
    """Computes the result of `added_cost` from measured costs.

    Args:
        few: requests of the first measurement.
        of_few: cost of the form with `few` requests.
        many: requests of the second measurement.
        of_many: cost of the form with `many` requests.
        plain: cost of the plain cache with `many` requests.
    """
    step = (of_few.seconds_per_request - of_many.seconds_per_request) / (1 / few - 1 / many)
    request = of_many.seconds_per_request - step / many - plain.seconds_per_request
    return of_many.seconds_per_token - plain.seconds_per_token, request, step


def decode_variants(setup: CalibrationSetup) -> Mapping[str, DecodeStep]:
    """Functions by form that run one decode step of all requests at a context length, on random contents."""
    layout, longest = setup.layout, max(setup.contexts)
    heads, head_dim, width = layout.kv_heads, layout.head_dim, layout.hidden_size

    def normal(*shape: int, by: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, dtype=setup.dtype, device=setup.device) * by

    per_request = -(-longest // layout.block_tokens)
    count = setup.requests * per_request
    blocks = normal(count, layout.block_tokens, 2, heads, head_dim)
    keys, values = blocks.unbind(2)
    hidden = layout.hidden_rows(blocks)
    order = torch.randperm(count, device=setup.device).to(torch.int32)
    tables = order.view(setup.requests, per_request)
    weights = [normal(heads * head_dim, width, by=width**-0.5) for _ in range(2)]
    biases = [None, None] if setup.rotary else [normal(heads * head_dim) for _ in range(2)]
    projection = Projection(*weights, *biases)
    rotary = None
    if setup.rotary:
        angle = torch.rand(longest, head_dim // 2, device=setup.device)
        rotary = Rotary(angle.cos(), angle.sin())
    query, scale = normal(setup.requests, heads, head_dim), head_dim**-0.5

    # Cached, so that its construction is not timed.
    @cache
    def held(context: int) -> HeldTokens:
        lengths = torch.full((setup.requests,), context, dtype=torch.int32, device=setup.device)
        return HeldTokens(tables, lengths, context)

    ways: dict[str, DecodeStep] = {
        "kv": lambda n: ops.paged_decode(query, keys, values, held(n), scale),
        "m0": lambda n: decode.restored(query, hidden, held(n), projection, rotary, scale),
        "m1": lambda n: decode.value_absorbed(query, hidden, held(n), projection, rotary, scale),
    }
    if rotary is None:
        ways["m2"] = lambda n: decode.absorbed(query, hidden, held(n), projection, scale)
    return ways


def copy_bandwidth(device: torch.device, *, megabytes: int, repeats: int) -> float:
    """Bytes per second read and written by a plain copy: the limit of a memory-bound kernel."""
    source = torch.ones(megabytes << 20, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    into.copy_(source)
    taken = [_seconds(lambda: into.copy_(source), source[:0]) for _ in range(repeats)]
    return 2.0 * (megabytes << 20) / median(taken)


def _seconds(run: Callable[[], object], flushed: torch.Tensor) -> float:
    if not flushed.is_cuda:
        before = perf_counter()
        run()
        return perf_counter() - before
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flushed.zero_()
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def _fit_line(setup: CalibrationSetup, medians: Sequence[float]) -> Cost:
    """Least-squares line through (context, seconds per request)."""
    each = [taken / setup.requests for taken in medians]
    mean_x, mean_y = sum(setup.contexts) / len(each), sum(each) / len(each)
    spread = sum((x - mean_x) ** 2 for x in setup.contexts)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(setup.contexts, each, strict=True)) / spread
    return Cost(slope, mean_y - slope * mean_x, tuple(medians))
