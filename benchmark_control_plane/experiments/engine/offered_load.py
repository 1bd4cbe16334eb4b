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
class OfferedClass:
    """A service class of a replay: its share of the requests, its priority and objectives."""

    name: str
    share: float
    priority: int
    objectives: TokenObjectives


@dataclass(frozen=True, slots=True)
class EmbeddingsBeside:
    """Embedding passes beside the engine: share of the device's time, and a pass's seconds and objective."""

    device_share: float
    pass_seconds: float
    objective: float


@dataclass(frozen=True, slots=True)
class Dataset:
    """Lengths of one data set that fit the context, and the objectives that its requests get.

    With `classes` each request has the objectives of its class.
    """

    name: str
    lengths: Sequence[Lengths]
    objectives: TokenObjectives
    classes: Sequence[OfferedClass]
    embeddings: EmbeddingsBeside | None


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
    service_class: OfferedClass | None = None

    def objectives(self, default: TokenObjectives) -> TokenObjectives:
        """The objectives of its class; `default` without one."""
        return default if self.service_class is None else self.service_class.objectives


def dataset(name: str, folder: Path, context: int) -> Dataset:
    """Reads one of DATASET_NAMES. Raises BadInput if `folder` lacks its file."""
    base, *variants = name.split("-")
    read, file, objectives = DATASETS[base]
    return Dataset(
        name,
        _within(read(folder / file), context),
        objectives,
        THREE_CLASSES if "classes" in variants else (),
        EMBEDDINGS_BESIDE if "embeddings" in variants else None,
    )


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
DATASET_NAMES = [
    f"{name}{variant}" for name in DATASETS for variant in ("", "-classes", "-classes-embeddings")
]
"""A data set alone, with three classes, and with embeddings beside them."""

THREE_CLASSES = (
    OfferedClass("interactive", 0.5, 2, TokenObjectives(1.0, 1.0)),
    OfferedClass("standard", 0.3, 1, TokenObjectives(5.0, 2.0)),
    OfferedClass("batch", 0.2, 0, TokenObjectives(60.0, 10.0)),
)
EMBEDDINGS_BESIDE = EmbeddingsBeside(device_share=0.15, pass_seconds=0.02, objective=0.3)


def poisson(
    lengths: Sequence[Lengths],
    rate: float,
    seed: int,
    prediction: Prediction,
    arrivals: float = 1.0,
    classes: Sequence[OfferedClass] = (),
) -> Iterator[Offer]:
    """Endless trace at `rate` requests per second; a seed gives the same requests at every rate.

    `arrivals` is the coefficient of variation of the gaps (1: Poisson, else gamma).
    """
    random, of_class = Random(seed), Random(f"classes {seed}")
    shares = [offered.share for offered in classes]
    shape = 1 / arrivals**2
    at = 0.0
    for _ in count():
        prompt, output = random.choice(lengths)
        draw = random.gauss(0, 1)
        at += random.gammavariate(shape, 1 / shape) / rate
        offered = of_class.choices(classes, shares)[0] if classes else None
        yield Offer(at, prompt, output, prediction.of(output, draw), service_class=offered)
