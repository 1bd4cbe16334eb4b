"""Ring buffer of finished requests, as arrays, from which the length model is trained.

A row holds numeric features, hashed words and, if an embedding model computed one, the vector of the prompt;
neither text nor token ids are kept. If the vector dimension changes, all earlier vectors are dropped.
"""

from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import log1p
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from controlplane.core.memory_ledger import Floats
from controlplane.core.request import Request
from predictors.output_length.features import BUCKETS, MOST_WORDS, NUMBERS, bucket
from predictors.output_length.ridge import Words

CONTEXT = ("log_prompt_tokens", "log_max_tokens", "recent_mean", "recent_spread")
ROW = (*NUMBERS, *CONTEXT)

_CALLER_WORDS = 3
WIDTH = 2 * (MOST_WORDS + _CALLER_WORDS)
_NO_NUMBERS = (0.0,) * len(NUMBERS)
# Each word is hashed twice, alone and combined with the model, because it may predict another length there.
_MIX = 40_503
_NO_VECTOR = np.zeros(0, np.float16)

Vectors = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """Features of one request; prompts with equal words have equal `group`."""

    numbers: Floats
    words: npt.NDArray[np.uint16]
    group: int
    vector: Vectors = field(default_factory=lambda: _NO_VECTOR)

    def as_rows(self) -> "Rows":
        """A batch of one row."""
        return Rows(self.numbers[None], self.words[None], self.vector[None])


def feature_row(request: Request, recent_mean: float, recent_spread: float) -> FeatureRow:
    """Features of a request.

    `recent_mean` and `recent_spread` are the mean and deviation of the log output lengths recently seen for
    the class and model of the request.
    """
    features = request.features
    known = (_NO_NUMBERS, ()) if features is None else (features.numbers, features.words)
    numbers = np.array(
        (
            *known[0],
            log1p(request.prompt_tokens),
            log1p(request.max_output_tokens),
            recent_mean,
            recent_spread,
        )
    )
    words, group = _words(known[1], request.service_class.name, request.tenant, request.model)
    vector = _NO_VECTOR if features is None else np.frombuffer(features.vector, np.float16)
    return FeatureRow(numbers, words, group, vector)


@lru_cache(maxsize=1_024)
def _words(
    prompt_words: tuple[int, ...], class_name: str, tenant: str, model_name: str
) -> tuple[npt.NDArray[np.uint16], int]:
    """The words of a row, read-only, and its group. A request is forecast again as its output grows."""
    model = bucket(f"model={model_name}")
    caller = (bucket(f"class={class_name}"), bucket(f"tenant={tenant}"), model)
    words = np.zeros(WIDTH, np.uint16)
    own = np.array((*prompt_words, *caller), np.uint16)
    words[: len(own)] = own
    words[WIDTH // 2 : WIDTH // 2 + len(own)] = (own.astype(np.uint32) * _MIX ^ model) % BUCKETS
    words.setflags(write=False)
    return words, crc32(own[: len(prompt_words)].tobytes()) & 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Rows:
    """Features of n requests: numbers [n, len(ROW)], words [n, WIDTH], vectors [n, dimensions] or zero."""

    numbers: Floats
    words: Words
    vectors: Vectors

    def select(self, chosen: npt.NDArray[Any]) -> "Rows":
        """The rows with these indices, or those where a boolean mask is true."""
        return Rows(self.numbers[chosen], self.words[chosen], self.vectors[chosen])


def model_buckets(words: Words) -> npt.NDArray[np.uint16]:
    """Hash bucket of each row's model, the last of the row's own words in `feature_row`."""
    own = words[:, : WIDTH // 2]
    # The hash of a word may be 0 as well as an unused place.
    last = own.shape[1] - 1 - np.argmax(own[:, ::-1] != 0, 1)
    found: npt.NDArray[np.uint16] = own[np.arange(len(own)), last]
    return found


@dataclass(frozen=True, slots=True)
class Table(Rows):
    """Training rows: features, groups [n] and log output tokens [n]."""

    groups: npt.NDArray[np.int64]
    log_tokens: Floats

    def __len__(self) -> int:
        return len(self.log_tokens)

    def head(self, count: int) -> "Table":
        """First `count` rows."""
        return Table(*(getattr(self, f.name)[:count] for f in fields(Table)))


class Examples:
    """Ring buffer of at most `most` rows; `seen` counts all rows ever added."""

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
        """Appends a finished request; overwrites the oldest row when full."""
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
        """Copy of all rows, oldest first."""
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
        """Appends the rows of a table, at most as many as fit."""
        for at in range(max(0, len(table) - self.most), len(table)):
            vector = table.vectors[at] if table.vectors[at].any() else _NO_VECTOR
            row = FeatureRow(table.numbers[at], table.words[at], int(table.groups[at]), vector)
            self.add(row, float(table.log_tokens[at]))
