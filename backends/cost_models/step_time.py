"""How long does a step take when an LLM and an embedding model share one device?

A step reads prompt chunks, decodes one token each for others, and may embed one padded batch besides.
`in_turn` runs the kinds one after another and adds their times. Here are lines and measured profiles;
`roofline` reasons from a device's figures. A kind without work costs nothing. Seconds throughout.
"""

import csv
import gzip
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import IO, cast


@dataclass(slots=True)
class StepLoad:
    """`squares` sums end^2 - start^2 over the prompt chunks: a prompt's chunks add up to its length squared,
    the measure of its attention. `cells` are the KV cells that the sequences hold; the embedding batch is
    `inputs` padded to `length`."""

    prefill_tokens: int = 0
    squares: int = 0
    decodes: int = 0
    cells: int = 0
    inputs: int = 0
    length: int = 0

    @property
    def has_llm(self) -> bool:
        return self.prefill_tokens > 0 or self.decodes > 0


BatchTime = Callable[[StepLoad], float]

StepTime = Callable[[int, int, int], float]
"""Of an LLM alone: (prefill tokens, decoding requests, KV cells) -> seconds."""

TILE_TOKENS = 128
# Llama-2-70B on A100s after Vidur's profile.
LLAMA2_70B_TP1 = (0.09255, 2.093e-4, 0.04804, 2.5e-7)


def tile(a: float, b: float, g: float, d: float) -> StepTime:
    """a + b * tokens + g * (tiles - 1) + d * cells: GEMMs run in tiles of tokens, so time rises in stairs."""

    def step_time(prefill_tokens: int, decodes: int, cells: int) -> float:
        tokens = prefill_tokens + decodes
        return a + b * tokens + g * (ceil(tokens / TILE_TOKENS) - 1) + d * cells

    return step_time


def affine(a: float, b: float, c: float, d: float) -> StepTime:
    """a + b * prefill tokens + c * decodes + d * cells: the line that most papers fit."""

    def step_time(prefill_tokens: int, decodes: int, cells: int) -> float:
        return a + b * prefill_tokens + c * decodes + d * cells

    return step_time


MODELS: Mapping[str, Callable[[float, float, float, float], StepTime]] = {"tile": tile, "affine": affine}


def pace(step_time: StepTime, memory: int) -> tuple[float, float]:
    """Seconds of an ordinary step (one tile of decodes, memory half full) and of one more prompt token."""
    ordinary = step_time(0, TILE_TOKENS, memory // 2)
    tokens = 8 * TILE_TOKENS
    return ordinary, (step_time(tokens, TILE_TOKENS, 0) - step_time(0, TILE_TOKENS, 0)) / tokens


def in_turn(*parts: BatchTime) -> BatchTime:
    """The parts share the device by turns, within each step."""
    return lambda load: sum(part(load) for part in parts)


def llm_only(step_time: StepTime) -> BatchTime:
    return lambda load: step_time(load.prefill_tokens, load.decodes, load.cells) if load.has_llm else 0.0


def embedding_line(base: float, per_token: float) -> BatchTime:
    """base + per_token * padded tokens."""
    return lambda load: base + per_token * load.inputs * load.length if load.inputs else 0.0


# --- measured profiles -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """In DistServe's form, in seconds: prefill a + b*P + c*P^2; decode a + b*cells + c*D, in two pieces by
    the number of decodes D. A mixed step costs the decode and the prompt's own terms: the weights are read
    once. `slower` stretches what memory traffic bounds: decoding."""

    prefill: tuple[float, float, float]
    small: tuple[float, float, float]
    large: tuple[float, float, float]
    large_from: int
    slower: float = 1.0

    def __call__(self, load: StepLoad) -> float:
        start, linear, square = self.prefill
        prompt = linear * load.prefill_tokens + square * load.squares
        if not load.decodes:
            return start + prompt if load.prefill_tokens else 0.0
        base, cell, decode = self.small if load.decodes < self.large_from else self.large
        return self.slower * (base + cell * load.cells + decode * load.decodes) + prompt


def fitted_profile(path: Path, model: str, *, tensor_parallel: int = 1) -> Fit:
    """From a JSON file of such fits in milliseconds. Raises ValueError naming what the file has instead."""
    fits = json.loads(path.read_text(encoding="utf-8"))
    try:
        fit = fits[model][str(tensor_parallel)]
        return Fit(
            prefill=_seconds(fit["prefill"]),
            small=_seconds(fit["decoding_smallbs"]),
            large=_seconds(fit["decoding_largebs"]),
            large_from=int(fit["decoding_large_small_bs_threshold"]),
        )
    except KeyError as error:
        known = ", ".join(f"{name} on {ranks}" for name, by in fits.items() for ranks in by)
        raise ValueError(f"{path}: no {error} for {model} on {tensor_parallel}; it has {known}") from error


def _seconds(milliseconds: Sequence[float]) -> tuple[float, float, float]:
    first, second, third = milliseconds
    return 1e-3 * first, 1e-3 * second, 1e-3 * third


# DistServe's fit of vLLM serving OPT-13B on one A100-80GB (profiler-a100-80g, vllm, TP 1). An A100-40GB
# has 1,555 instead of 2,039 GB/s, and the same arithmetic.
OPT_13B_A100_80G = Fit(
    prefill=_seconds((22.0522, 0.140509, 8.0766e-6)),
    small=_seconds((23.4750, 0.000592934, 0.0607269)),
    large=_seconds((20.2064, 0.000490773, 0.1200031)),
    large_from=95,
)
BATCH_TIMES: Mapping[str, BatchTime] = {
    "opt-13b-a100-80g": OPT_13B_A100_80G,
    "opt-13b-a100-40g": replace(OPT_13B_A100_80G, slower=2_039 / 1_555),
    # For tests of counts and order alone.
    "instant": lambda load: 0.0,
}


@dataclass(frozen=True, slots=True)
class Curve:
    """Measurements at rising `points`; between them linear, beyond them along the last slope, before them
    flat: a smaller batch than any measured costs as much."""

    points: Sequence[float]
    values: Sequence[float]

    def at(self, point: float) -> float:
        points, values = self.points, self.values
        if len(points) == 1 or point <= points[0]:
            return values[0]
        i = min(bisect_right(points, point) - 1, len(points) - 2)
        share = (point - points[i]) / (points[i + 1] - points[i])
        return values[i] + share * (values[i + 1] - values[i])


@dataclass(frozen=True, slots=True)
class Grid:
    """One curve over y at each of rising `xs`; across them as along a curve."""

    xs: Sequence[float]
    curves: Sequence[Curve]

    def at(self, x: float, y: float) -> float:
        return Curve(self.xs, [curve.at(y) for curve in self.curves]).at(x)


def read_grid(
    path: Path, x: str, y: str, milliseconds: str, *, where: Mapping[str, str] | None = None
) -> Grid:
    """From a CSV (plain or .gz) with these columns, of the rows whose columns match `where`. What was
    measured twice is averaged. Raises ValueError if a column or every row is missing."""
    found: dict[float, dict[float, list[float]]] = {}
    with _opened(path) as file:
        reader = csv.DictReader(file)
        known = ", ".join(reader.fieldnames or ())
        for name in (x, y, milliseconds, *(where or {})):
            if name not in (reader.fieldnames or ()):
                raise ValueError(f"{path}: no column {name!r}; it has {known}")
        for row in reader:
            if all(row[name] == value for name, value in (where or {}).items()):
                by_y = found.setdefault(float(row[x]), {})
                by_y.setdefault(float(row[y]), []).append(1e-3 * float(row[milliseconds]))
    if not found:
        raise ValueError(f"{path}: no row where {where or 'anything was measured'}")
    xs = sorted(found)
    curves = [
        Curve(sorted(found[key]), [fmean(found[key][other]) for other in sorted(found[key])]) for key in xs
    ]
    return Grid(xs, curves)


def embedding_table(grid: Grid) -> BatchTime:
    """`grid` over padded length and number of inputs."""
    return lambda load: grid.at(load.length, load.inputs) if load.inputs else 0.0


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8", newline=""))
    return path.open(encoding="utf-8", newline="")
