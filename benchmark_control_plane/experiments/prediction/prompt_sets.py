"""Reads public sets of prompts with outputs as one mixed service or one by one.

Arena-Hard v0.1 with the outputs of three models, GPTeacher code and roleplay, GSM8K (test), HumanEval. The
last four name no model and are labelled "reference". Output tokens are counted by pieces that an LLM's
tokenizer would make: up to seven letters, three digits, two signs, or the line ends.
"""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

from controlplane.core.clock import Instant
from controlplane.core.request import Kind, PromptFeatures, Request
from controlplane.core.slo import ServiceClass, Slo
from predictors.output_length.features import prompt_features

ARENA_MODELS = ("gpt-3.5-turbo-0125", "gpt-4-0314", "gpt-4-0613")
UNNAMED = "reference"
CONTEXT = 4_096

_PIECE = re.compile(r"[A-Za-z]{1,7}|\d{1,3}|[^\sA-Za-z\d]{1,2}|\n+")
_serial = count()


@dataclass(frozen=True, slots=True)
class PromptSample:
    """One prompt with the number of its output tokens and its features."""

    source: str
    model: str
    prompt: str
    prompt_tokens: int
    tokens: int
    features: PromptFeatures

    def fold(self, folds: int) -> int:
        """Fold of the prompt; equal prompts share one, so that no method is tested on a learned prompt."""
        return crc32(self.prompt.encode()) % folds

    def request(self, *, model: str | None = None) -> Request:
        """A request with this prompt, under the sample's model name or another."""
        return Request(
            id=f"s{next(_serial)}",
            kind=Kind.GENERATE,
            model=model or self.model,
            tenant="benchmark",
            service_class=ServiceClass("chat", Slo(), priority=0, sheddable=False),
            slo=Slo(),
            arrival=Instant(0),
            prompt_tokens=self.prompt_tokens,
            max_output_tokens=CONTEXT,
            features=self.features,
        )


def tokens_of(text: str) -> int:
    """Approximate number of tokens."""
    return max(1, len(_PIECE.findall(text)))


def samples(folder: Path) -> list[PromptSample]:
    """Reads `prompts` in the folder of public data. Raises FileNotFoundError if a set is absent."""
    return [
        PromptSample(source, model, prompt, tokens_of(prompt), tokens_of(answer), prompt_features(prompt))
        for source, model, prompt, answer in _prompts_and_outputs(folder / "prompts")
    ]


def _prompts_and_outputs(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    for model in ARENA_MODELS:
        for row in _lines(folder / f"arena_hard_v0.1/{model}.jsonl.gz"):
            question, answer = row["messages"][0]["content"], row["messages"][1]["content"]["answer"]
            yield f"arena-hard {model}", model, question, answer
    for part in ("codegen", "roleplay"):
        with gzip.open(folder / f"gpteacher_{part}.json.gz", "rt", encoding="utf-8") as file:
            for row in json.load(file):
                prompt = f"{row['instruction']}\n{row['input']}".strip()
                yield f"gpteacher {part}", UNNAMED, prompt, row["response"]
    for row in _lines(folder / "gsm8k_test.jsonl.gz"):
        yield "gsm8k", UNNAMED, row["question"], row["answer"]
    for row in _lines(folder / "humaneval.jsonl.gz"):
        yield "humaneval", UNNAMED, row["prompt"], row["canonical_solution"]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
