"""Step times of an LLM and an embedding model that share one device, from lines and measured profiles.

A step prefills prompt chunks, decodes one token for each other running request, and may compute one padded
embedding batch. `sequential` adds the times of the parts. A part without work takes no time.
`backends.cost_models.roofline` derives a model from device figures instead. All times are in seconds.
"""

import csv
import gzip
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import IO, cast


@dataclass(slots=True)
class StepLoad:
    """Work of one step.

    `squares` is the sum of end^2 - start^2 over the prompt chunks, so the chunks of a prompt add up to its
    squared length, which measures its attention. `cells` are the KV cells that the sequences hold. The
    embedding batch has `inputs` inputs padded to `length` tokens.
    """

    prefill_tokens: int = 0
    squares: int = 0
    decodes: int = 0
    cells: int = 0
    inputs: int = 0
    length: int = 0

    @property
    def has_llm(self) -> bool:
        """Whether the step prefills or decodes."""
        return self.prefill_tokens > 0 or self.decodes > 0


BatchTime = Callable[[StepLoad], float]

StepTime = Callable[[int, int, int], float]
"""(prefill tokens, decoding requests, KV cells) -> seconds of a step of an LLM alone."""

TILE_TOKENS = 128
# Llama-2-70B on A100s, from Vidur's profile.
LLAMA2_70B_TP1 = (0.09255, 2.093e-4, 0.04804, 2.5e-7)


def tile(a: float, b: float, g: float, d: float) -> StepTime:
    """Step time a + b * tokens + g * (tiles - 1) + d * cells: GEMMs compute whole tiles of tokens."""

    def step_time(prefill_tokens: int, decodes: int, cells: int) -> float:
        tokens = prefill_tokens + decodes
        return a + b * tokens + g * (ceil(tokens / TILE_TOKENS) - 1) + d * cells

    return step_time


def affine(a: float, b: float, c: float, d: float) -> StepTime:
    """Step time a + b * prefill tokens + c * decodes + d * cells, the form that most papers fit."""

    def step_time(prefill_tokens: int, decodes: int, cells: int) -> float:
        return a + b * prefill_tokens + c * decodes + d * cells

    return step_time


STEP_TIME_FORMS: Mapping[str, Callable[[float, float, float, float], StepTime]] = {
    "tile": tile,
    "affine": affine,
}


def pace(step_time: StepTime, memory: int) -> tuple[float, float]:
    """Seconds of a typical step (one tile of decodes, memory half full) and of one more prompt token."""
    ordinary = step_time(0, TILE_TOKENS, memory // 2)
    tokens = 8 * TILE_TOKENS
    return ordinary, (step_time(tokens, TILE_TOKENS, 0) - step_time(0, TILE_TOKENS, 0)) / tokens


def sequential(*parts: BatchTime) -> BatchTime:
    """Time of a step that runs the parts sequentially."""

    def batch_time(load: StepLoad) -> float:
        took = 0.0
        for part in parts:
            took += part(load)
        return took

    return batch_time


def llm_only(step_time: StepTime) -> BatchTime:
    """Adapts a step time of an LLM alone to a batch time."""
    return lambda load: step_time(load.prefill_tokens, load.decodes, load.cells) if load.has_llm else 0.0


def embedding_line(base: float, per_token: float, per_square: float = 0.0) -> BatchTime:
    """Batch time base + per_token * padded tokens + per_square * inputs * squared padded length."""

    def batch_time(load: StepLoad) -> float:
        padded = load.inputs * load.length
        return base + padded * (per_token + per_square * load.length) if load.inputs else 0.0

    return batch_time


@dataclass(frozen=True, slots=True)
class PiecewiseFit:
    """Fit in DistServe's form, in seconds, with two pieces by the number of decodes D.

    Prefill takes a + b*P + c*P^2, decode a + b*cells + c*D. A mixed step takes the decode and the prompt's
    linear and square terms, because weights are read once. `slower` scales decoding, which memory bandwidth
    bounds.
    """

    prefill: tuple[float, float, float]
    small: tuple[float, float, float]
    large: tuple[float, float, float]
    large_from: int
    slower: float = 1.0

    def __call__(self, load: StepLoad) -> float:
        """Time of the step in seconds."""
        start, linear, square = self.prefill
        prompt = linear * load.prefill_tokens + square * load.squares
        if not load.decodes:
            return start + prompt if load.prefill_tokens else 0.0
        base, cell, decode = self.small if load.decodes < self.large_from else self.large
        return self.slower * (base + cell * load.cells + decode * load.decodes) + prompt


def _seconds(milliseconds: Sequence[float]) -> tuple[float, float, float]:
    first, second, third = milliseconds
    return 1e-3 * first, 1e-3 * second, 1e-3 * third


# DistServe's fit of vLLM serving OPT-13B on one A100-80GB (profiler-a100-80g, vllm, TP 1). An A100-40GB
# has 1,555 instead of 2,039 GB/s, and the same arithmetic.
OPT_13B_A100_80G = PiecewiseFit(
    prefill=_seconds((22.0522, 0.140509, 8.0766e-6)),
    small=_seconds((23.4750, 0.000592934, 0.0607269)),
    large=_seconds((20.2064, 0.000490773, 0.1200031)),
    large_from=95,
)
BATCH_TIMES: Mapping[str, BatchTime] = {
    "opt-13b-a100-80g": OPT_13B_A100_80G,
    "opt-13b-a100-40g": replace(OPT_13B_A100_80G, slower=2_039 / 1_555),
    # For tests of counts and order only.
    "instant": lambda load: 0.0,
}


@dataclass(frozen=True, slots=True)
class Curve:
    """Piecewise linear curve through measurements at increasing `points`.

    Beyond the last point the last slope continues. Before the first the curve is flat, because a smaller
    batch than any measured takes as long.
    """

    points: Sequence[float]
    values: Sequence[float]

    def at(self, point: float) -> float:
        """Value at `point`."""
        points, values = self.points, self.values
        if len(points) == 1 or point <= points[0]:
            return values[0]
        i = min(bisect_right(points, point) - 1, len(points) - 2)
        share = (point - points[i]) / (points[i + 1] - points[i])
        return values[i] + share * (values[i + 1] - values[i])


@dataclass(frozen=True, slots=True)
class Grid:
    """One curve over y at each of increasing `xs`, interpolated between them like a curve."""

    xs: Sequence[float]
    curves: Sequence[Curve]

    def at(self, x: float, y: float) -> float:
        """Value at (x, y)."""
        return Curve(self.xs, [curve.at(y) for curve in self.curves]).at(x)


def read_grid(path: Path, x: str, y: str, milliseconds: str) -> Grid:
    """Reads a grid from three columns of a CSV file, plain or .gz.

    Args:
        path: the file.
        x: column of the outer coordinate.
        y: column of the inner coordinate.
        milliseconds: column of the durations; repeated measurements are averaged.

    Raises ValueError if a column is missing or there is no row.
    """
    found: dict[float, dict[float, list[float]]] = {}
    with _opened(path) as file:
        reader = csv.DictReader(file)
        known = ", ".join(reader.fieldnames or ())
        for name in (x, y, milliseconds):
            if name not in (reader.fieldnames or ()):
                raise ValueError(f"{path}: no column {name!r}; it has {known}")
        for row in reader:
            by_y = found.setdefault(float(row[x]), {})
            by_y.setdefault(float(row[y]), []).append(1e-3 * float(row[milliseconds]))
    if not found:
        raise ValueError(f"{path}: no row with a measured time")
    xs = sorted(found)
    curves = [
        Curve(sorted(found[key]), [fmean(found[key][other]) for other in sorted(found[key])]) for key in xs
    ]
    return Grid(xs, curves)


def embedding_table(grid: Grid) -> BatchTime:
    """Batch time from a `grid` over padded length and number of inputs."""
    return lambda load: grid.at(load.length, load.inputs) if load.inputs else 0.0


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8", newline=""))
    return path.open(encoding="utf-8", newline="")
