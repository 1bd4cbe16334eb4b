"""What is offered to an engine? Requests with true and predicted lengths, arriving at random.

Lengths are drawn from token counts of public data sets (see docs/benchmarking.md): ShareGPT
conversations, arXiv summaries cut to the model's context, and HumanEval-like programming tasks. The noise
of a prediction is lognormal around the true length.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

from benchmark_control_plane.common.arguments import BadInput
from benchmark_control_plane.common.row_files import rows
from controlplane.core.forecast import LengthForecast

Lengths = tuple[int, int]

# Of Python code under Llama's tokenizer, about.
_CHARACTERS_A_TOKEN = 3.2


@dataclass(frozen=True, slots=True)
class TokenObjectives:
    """Seconds to the first token, and between two tokens."""

    ttft: float
    gap: float


@dataclass(frozen=True, slots=True)
class Dataset:
    name: str
    lengths: Sequence[Lengths]
    promise: TokenObjectives


@dataclass(frozen=True, slots=True)
class Prediction:
    """`sigma` of the lognormal noise, `factor` of a constant error; None of either: nothing is predicted."""

    sigma: float | None = 0.0
    factor: float = 1.0

    def of(self, output_tokens: int, draw: float) -> int | None:
        if self.sigma is None:
            return None
        return max(1, round(output_tokens * self.factor * math.exp(self.sigma * draw)))


@dataclass(frozen=True, slots=True)
class Offer:
    """`forecast` is what `predicted` is the mean of, where a whole distribution is known."""

    at: float
    prompt: int
    output: int
    predicted: int | None
    forecast: LengthForecast | None = None


def dataset(name: str, folder: Path, context: int) -> Dataset:
    """One of DATASETS. Raises BadInput where `folder` has it not."""
    read, file, promise = DATASETS[name]
    return Dataset(name, _within(read(folder / file), context), promise)


def _within(lengths: Sequence[Lengths], context: int) -> list[Lengths]:
    kept = [(p, o) for p, o in lengths if p >= 1 and o >= 1 and p + o < context]
    if not kept:
        raise BadInput(f"no request of the data set fits a context of {context} tokens")
    return kept


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
    """Without end. The same seed gives the same requests at every rate; `arrivals` is the coefficient of
    variation of the gaps between them (1: Poisson, else gamma)."""
    random = Random(seed)
    shape = 1 / arrivals**2
    at = 0.0
    for _ in count():
        prompt, output = random.choice(lengths)
        draw = random.gauss(0, 1)
        at += random.gammavariate(shape, 1 / shape) / rate
        yield Offer(at, prompt, output, prediction.of(output, draw))
