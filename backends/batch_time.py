"""How long does a step take when an LLM and an embedding model share one device?

A step reads prompt chunks, decodes one token each for others, and may embed one padded batch besides.
`in_turn` runs the kinds one after another and adds their times; `Roofline` lets the arithmetic of one
hide behind the memory traffic of the other. A kind without work costs nothing. Seconds throughout.
"""

import csv
import gzip
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import IO, Any, cast

from backends.step_time_models import StepTime


@dataclass(slots=True)
class StepLoad:
    """`squares` sums end^2 - start^2 over the prompt chunks: a prompt's chunks add up to its length squared,
    the measure of its attention. `cells` are the KV cells that all sequences hold before the step;
    the embedding batch is `inputs` padded to `length`."""

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


def in_turn(*parts: BatchTime) -> BatchTime:
    """The parts share the device by turns, within each step."""
    return lambda load: sum(part(load) for part in parts)


def llm_only(step_time: StepTime) -> BatchTime:
    """Any model of an LLM step: tile, affine."""
    return lambda load: step_time(load.prefill_tokens, load.decodes, load.cells) if load.has_llm else 0.0


def embedding_line(base: float, per_token: float) -> BatchTime:
    """base + per_token * padded tokens."""
    return lambda load: base + per_token * load.inputs * load.length if load.inputs else 0.0


# --- measured profiles -----------------------------------------------------------------------


def fitted_profile(path: Path, model: str, *, tensor_parallel: int = 1) -> BatchTime:
    """LLM steps after a JSON file of fits in DistServe's form, in milliseconds: prefill a + b*P + c*P^2;
    decode a + b*cells + c*D, in two pieces by the number of decodes D. A mixed step costs the decode and the
    prompt's own terms: the weights are read once. Raises ValueError naming what the file has instead.
    """
    fits = json.loads(path.read_text(encoding="utf-8"))
    try:
        fit = fits[model][str(tensor_parallel)]
        start, linear, square = _seconds(fit["prefill"])
        small, large = _seconds(fit["decoding_smallbs"]), _seconds(fit["decoding_largebs"])
        threshold = int(fit["decoding_large_small_bs_threshold"])
    except KeyError as error:
        known = ", ".join(f"{name} on {ranks}" for name, by in fits.items() for ranks in by)
        raise ValueError(f"{path}: no {error} for {model} on {tensor_parallel}; it has {known}") from error

    def batch_time(load: StepLoad) -> float:
        prompt = linear * load.prefill_tokens + square * load.squares
        if not load.decodes:
            return start + prompt if load.prefill_tokens else 0.0
        base, cell, decode = small if load.decodes < threshold else large
        return base + cell * load.cells + decode * load.decodes + prompt

    return batch_time


def _seconds(milliseconds: Sequence[float]) -> tuple[float, float, float]:
    first, second, third = milliseconds
    return 1e-3 * first, 1e-3 * second, 1e-3 * third


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
        Curve(sorted(found[one]), [fmean(found[one][other]) for other in sorted(found[one])]) for one in xs
    ]
    return Grid(xs, curves)


def embedding_table(grid: Grid) -> BatchTime:
    """`grid` over padded length and number of inputs."""
    return lambda load: grid.at(load.length, load.inputs) if load.inputs else 0.0


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8", newline=""))
    return path.open(encoding="utf-8", newline="")


# --- roofline --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Device:
    """What kernels reach, not the data sheet: operations and bytes a second, and a step's fixed seconds."""

    operations: float
    bandwidth: float
    overhead: float


# About 0.6 of peak arithmetic and 0.8 of peak bandwidth, as dense fp16 kernels of usual shapes reach.
A100_40GB = Device(operations=0.6 * 312e12, bandwidth=0.8 * 1.555e12, overhead=3e-3)
H100_SXM = Device(operations=0.6 * 989e12, bandwidth=0.8 * 3.35e12, overhead=2e-3)


@dataclass(frozen=True, slots=True)
class Figures:
    """One model: numbers multiplied per token, bytes of those weights, attention width over all layers,
    bytes of a token's keys and values."""

    weights: int
    weight_bytes: int
    attention_width: int
    cell_bytes: int


def figures(config: Mapping[str, Any], cell_bytes: int, *, bytes_per_weight: int = 2) -> Figures:
    """Of a dense model, from its Hugging Face config. `cell_bytes` is `KvGeometry.bytes_per_token`; 0 marks
    an encoder."""
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    inner = int(config.get("intermediate_size") or config.get("ffn_dim") or 4 * hidden)
    # Gated feed-forward layers have a third matrix; their configs name SiLU or a gated GELU.
    activation = str(config.get("hidden_act", config.get("activation_function", "")))
    matrices = 3 if activation in ("silu", "swiglu", "geglu", "gelu_pytorch_tanh") else 2
    layer = 2 * hidden * head * (heads + kv_heads) + matrices * hidden * inner
    vocabulary = int(config.get("vocab_size", 0)) * hidden if cell_bytes else 0
    weights = layers * layer + vocabulary
    return Figures(weights, weights * bytes_per_weight, layers * heads * head, cell_bytes)


def roofline(device: Device, llm: Figures, embedder: Figures | None = None) -> BatchTime:
    """max(all arithmetic, all traffic) + overhead: a decode's traffic hides an embedding's arithmetic."""

    def batch_time(load: StepLoad) -> float:
        operations = traffic = 0.0
        if load.has_llm:
            tokens = load.prefill_tokens + load.decodes
            # A causal prompt attends to half its square; each pair takes 4 operations per width.
            pairs = load.squares / 2 + load.cells
            operations += 2 * llm.weights * tokens + 4 * llm.attention_width * pairs
            traffic += llm.weight_bytes + llm.cell_bytes * (load.cells + tokens)
        if load.inputs and embedder is not None:
            tokens = load.inputs * load.length
            operations += 2 * embedder.weights * tokens + 4 * embedder.attention_width * tokens * load.length
            traffic += embedder.weight_bytes
        if not operations:
            return 0.0
        return max(operations / device.operations, traffic / device.bandwidth) + device.overhead

    return batch_time
