"""What does a cached token cost every decode step here? Timed on one layer of the kernels that will serve.

The forms of the cache are taken in turn at several context lengths, so that a drift of the machine meets all
of them alike; a line through the medians separates the cost of a token from that of a request.
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
    """`contexts` are tokens a request. Rotary keys cannot be absorbed: for them `m2` is left out.

    On a GPU, `flushed_bytes` are written before each run: so nothing is found in its cache, and by the time
    they are written all kernels are launched, so that only theirs is timed. Without, so is the launching, as
    a step of an engine has it.
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
    """Of one layer, one step. `seconds` are medians, one a context."""

    seconds_per_token: float
    seconds_per_request: float
    seconds: tuple[float, ...]


DecodeStep = Callable[[int], torch.Tensor]


FORMS = ("kv", "m0", "m1", "m2")


def measure(setup: CalibrationSetup, forms: Collection[str] = FORMS) -> dict[str, Cost]:
    """By form: `kv` is the plain cache; `m0`, `m1`, `m2` restore hidden states, half of them, nothing."""
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
            medians.append(median(one[name] for one in rounds))
    return {name: _fit_line(setup, medians) for name, medians in taken.items()}


def added_cost(setup: CalibrationSetup, form: str, many: int) -> tuple[float, float, float]:
    """Seconds that a token, a request and having any add to one layer's step in `form` rather than as keys
    and values. What is paid once a step shows between `setup.requests` and `many`."""
    few = measure(setup, [form])[form]
    both = measure(replace(setup, requests=many), ["kv", form])
    return cost_differences(setup.requests, few, many, both[form], both["kv"])


def cost_differences(
    few: int, of_few: Cost, many: int, of_many: Cost, plain: Cost
) -> tuple[float, float, float]:
    """As `added_cost`, of costs in the form at two counts of requests, and of the plain cache at the second."""
    step = (of_few.seconds_per_request - of_many.seconds_per_request) / (1 / few - 1 / many)
    request = of_many.seconds_per_request - step / many - plain.seconds_per_request
    return of_many.seconds_per_token - plain.seconds_per_token, request, step


def decode_variants(setup: CalibrationSetup) -> Mapping[str, DecodeStep]:
    """One decode step of all requests at a context, over a cache of random contents."""
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

    # Made once, since making it is no part of what is timed.
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
    """Bytes per second read and written by a plain copy: what a kernel bound by memory can reach at most."""
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
    """Least squares through (context, seconds of one request)."""
    each = [taken / setup.requests for taken in medians]
    mean_x, mean_y = sum(setup.contexts) / len(each), sum(each) / len(each)
    spread = sum((x - mean_x) ** 2 for x in setup.contexts)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(setup.contexts, each, strict=True)) / spread
    return Cost(slope, mean_y - slope * mean_x, tuple(medians))
