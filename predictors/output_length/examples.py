"""What was asked lately, and how long were the answers? A bounded memory of finished requests, as arrays.

Rule: the oldest example makes room for the newest. A row is numbers, hashed words, and a vector where an
embedding model had made one: no text, no ids. Vectors of another dimension than the last are forgotten.
"""

from dataclasses import dataclass, field, fields
from math import log1p
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from controlplane.core.memory import Floats
from controlplane.core.request import Request
from predictors.output_length.features import BUCKETS, MOST_WORDS, NUMBERS, bucket
from predictors.output_length.ridge import Words

CONTEXT = ("log_prompt_tokens", "log_max_tokens", "recent_mean", "recent_spread")
ROW = (*NUMBERS, *CONTEXT)

_CALLER_WORDS = 3
WIDTH = 2 * (MOST_WORDS + _CALLER_WORDS)
_NO_NUMBERS = (0.0,) * len(NUMBERS)
# A word may mean another length for another model: each word counts once for all and once for the model.
_MIX = 40_503
_NO_VECTOR = np.zeros(0, np.float16)

Vectors = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """One request as a predictor sees it. `group` is alike for alike prompts."""

    numbers: Floats
    words: npt.NDArray[np.uint16]
    group: int
    vector: Vectors = field(default_factory=lambda: _NO_VECTOR)

    def as_rows(self) -> "Rows":
        return Rows(self.numbers[None], self.words[None], self.vector[None])


def feature_row(request: Request, recent_mean: float, recent_spread: float) -> FeatureRow:
    """The last two are of the log tokens of recent answers of the request's class and model."""
    features = request.features
    said = (_NO_NUMBERS, ()) if features is None else (features.numbers, features.words)
    numbers = np.array(
        (*said[0], log1p(request.prompt_tokens), log1p(request.max_output_tokens), recent_mean, recent_spread)
    )
    model = bucket(f"model={request.model}")
    caller = (bucket(f"class={request.service_class.name}"), bucket(f"tenant={request.tenant}"), model)
    words = np.zeros(WIDTH, np.uint16)
    own = np.array((*said[1], *caller), np.uint16)
    words[: len(own)] = own
    words[WIDTH // 2 : WIDTH // 2 + len(own)] = (own.astype(np.uint32) * _MIX ^ model) % BUCKETS
    vector = _NO_VECTOR if features is None else np.frombuffer(features.vector, np.float16)
    return FeatureRow(numbers, words, crc32(own[: len(said[1])].tobytes()) & 0x7FFFFFFF, vector)


@dataclass(frozen=True, slots=True)
class Rows:
    """What was asked: numbers [n, len(ROW)], words [n, WIDTH], vectors [n, dimensions], zero if unknown."""

    numbers: Floats
    words: Words
    vectors: Vectors

    def only(self, chosen: npt.NDArray[Any]) -> "Rows":
        return Rows(self.numbers[chosen], self.words[chosen], self.vectors[chosen])


def model_buckets(words: Words) -> npt.NDArray[np.uint16]:
    """The bucket of each row's model: the last of its own words, see `feature_row`."""
    own = words[:, : WIDTH // 2]
    found: npt.NDArray[np.uint16] = own[np.arange(len(own)), np.maximum(1, np.count_nonzero(own, 1)) - 1]
    return found


@dataclass(frozen=True, slots=True)
class Table(Rows):
    """Rows to learn from: groups [n], log tokens [n]."""

    groups: npt.NDArray[np.int64]
    log_tokens: Floats

    def __len__(self) -> int:
        return len(self.log_tokens)

    def head(self, count: int) -> "Table":
        return Table(*(getattr(self, f.name)[:count] for f in fields(Table)))


class Examples:
    """`seen` counts all that were ever added."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._numbers = np.zeros((most, len(ROW)), np.float32)
        self._words = np.zeros((most, WIDTH), np.uint16)
        self._vectors: Vectors = np.zeros((most, 0), np.float16)
        self._groups = np.zeros(most, np.int64)
        self._log_tokens = np.zeros(most, np.float32)
        self.seen = 0

    def __len__(self) -> int:
        return min(self.seen, self.most)

    def add(self, row: FeatureRow, log_tokens: float) -> None:
        at = self.seen % self.most
        self._numbers[at] = row.numbers
        self._words[at] = row.words
        if row.vector.size:
            if self._vectors.shape[1] != row.vector.size:
                self._vectors = np.zeros((self.most, row.vector.size), np.float16)
            self._vectors[at] = row.vector
        else:
            self._vectors[at] = 0.0
        self._groups[at] = row.group
        self._log_tokens[at] = log_tokens
        self.seen += 1

    def table(self) -> Table:
        """A copy, oldest first."""
        size = len(self)
        order = (np.arange(size) + (self.seen - size)) % self.most
        return Table(
            self._numbers[order].astype(float),
            self._words[order],
            self._vectors[order],
            self._groups[order],
            self._log_tokens[order].astype(float),
        )

    def extend(self, table: Table) -> None:
        for at in range(max(0, len(table) - self.most), len(table)):
            vector = table.vectors[at] if table.vectors[at].any() else _NO_VECTOR
            row = FeatureRow(table.numbers[at], table.words[at], int(table.groups[at]), vector)
            self.add(row, float(table.log_tokens[at]))
