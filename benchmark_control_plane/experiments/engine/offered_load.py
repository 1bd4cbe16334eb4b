"""Generates request traces with true and predicted lengths from public data sets.

Lengths are drawn from token counts (sources in docs/benchmarking.md): ShareGPT conversations, arXiv
summaries cut to the model's context, and HumanEval-like programming tasks. The error of a prediction is
lognormal around the true length.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.common.row_files import rows
from controlplane.core.forecast import LengthForecast

Lengths = tuple[int, int]
"""Prompt and output tokens of a request."""

# Approximate value for Python code under Llama's tokenizer.
_CHARACTERS_A_TOKEN = 3.2


@dataclass(frozen=True, slots=True)
class TokenObjectives:
    """Objectives in seconds: to the first token, and between two tokens."""

    ttft: float
    gap: float


@dataclass(frozen=True, slots=True)
class Dataset:
    """Lengths of one data set that fit the context, and the objectives that its requests get."""

    name: str
    lengths: Sequence[Lengths]
    objectives: TokenObjectives


@dataclass(frozen=True, slots=True)
class Prediction:
    """Error model of a length prediction: lognormal noise and a factor; `sigma` None predicts nothing."""

    sigma: float | None = 0.0
    factor: float = 1.0

    def of(self, output_tokens: int, draw: float) -> int | None:
        """Predicted tokens for a true length and a standard normal `draw`."""
        if self.sigma is None:
            return None
        return max(1, round(output_tokens * self.factor * math.exp(self.sigma * draw)))


@dataclass(frozen=True, slots=True)
class Offer:
    """One request: arrival in seconds, lengths, predicted output and, if known, the whole forecast."""

    at: float
    prompt: int
    output: int
    predicted: int | None
    forecast: LengthForecast | None = None


def dataset(name: str, folder: Path, context: int) -> Dataset:
    """Reads one of DATASETS. Raises BadInput if `folder` lacks its file."""
    read, file, objectives = DATASETS[name]
    return Dataset(name, _within(read(folder / file), context), objectives)


def _within(lengths: Sequence[Lengths], context: int) -> list[Lengths]:
    fitting = [(p, o) for p, o in lengths if p >= 1 and o >= 1 and p + o < context]
    if not fitting:
        raise BadInput(f"no request of the data set fits a context of {context} tokens")
    return fitting


def _counts(path: Path) -> list[Lengths]:
    return [(int(r["num_prefill_tokens"]), int(r["num_decode_tokens"])) for r in rows(path)]


def _programs(path: Path) -> list[Lengths]:
    return [
        (
            round(len(task["prompt"]) / _CHARACTERS_A_TOKEN),
            round(len(task["canonical_solution"]) / _CHARACTERS_A_TOKEN),
        )
        for task in rows(path)
    ]


DATASETS: Mapping[str, tuple[Callable[[Path], list[Lengths]], str, TokenObjectives]] = {
    "sharegpt": (_counts, "lengths/sharegpt_v3_lens.csv.gz", TokenObjectives(1.0, 1.0)),
    "arxiv": (_counts, "lengths/arxiv_summarization_llama2.csv.gz", TokenObjectives(4.0, 1.0)),
    "humaneval": (_programs, "prompts/humaneval.jsonl.gz", TokenObjectives(0.5, 0.5)),
}


def poisson(
    lengths: Sequence[Lengths], rate: float, seed: int, prediction: Prediction, arrivals: float = 1.0
) -> Iterator[Offer]:
    """Endless trace at `rate` requests per second; a seed gives the same requests at every rate.

    `arrivals` is the coefficient of variation of the gaps (1: Poisson, else gamma).
    """
    random = Random(seed)
    shape = 1 / arrivals**2
    at = 0.0
    for _ in count():
        prompt, output = random.choice(lengths)
        draw = random.gauss(0, 1)
        at += random.gammavariate(shape, 1 / shape) / rate
        yield Offer(at, prompt, output, prediction.of(output, draw))
