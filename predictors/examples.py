"""What was asked lately, and how long were the answers? A bounded memory of finished requests, as arrays.

Rule: the oldest example makes room for the newest. A row is numbers and hashed words: no text, no ids.
"""

from dataclasses import dataclass
from math import log1p
from zlib import crc32

import numpy as np
import numpy.typing as npt

from controlplane.core.memory import Floats
from controlplane.core.request import Request
from predictors.features import BUCKETS, MOST_WORDS, NUMBERS, bucket
from predictors.ridge import Words

CONTEXT = ("log_prompt_tokens", "log_max_tokens", "recent_mean", "recent_spread")
ROW = (*NUMBERS, *CONTEXT)

_CALLER_WORDS = 3
WIDTH = 2 * (MOST_WORDS + _CALLER_WORDS)
_NO_NUMBERS = (0.0,) * len(NUMBERS)
# A word may mean another length for another model: each word counts once for all and once for the model.
_MIX = 40_503


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as a predictor sees it. `group` is alike for alike prompts."""

    numbers: Floats
    words: npt.NDArray[np.uint16]
    group: int


def asked(request: Request, recent_mean: float, recent_spread: float) -> Asked:
    """The last two are of the log tokens of recent answers of the request's class and model."""
    gist = request.gist
    said = (_NO_NUMBERS, ()) if gist is None else (gist.numbers, gist.words)
    numbers = np.array(
        (*said[0], log1p(request.prompt_tokens), log1p(request.max_output_tokens), recent_mean, recent_spread)
    )
    model = bucket(f"model={request.model}")
    caller = (bucket(f"class={request.service_class.name}"), bucket(f"tenant={request.tenant}"), model)
    words = np.zeros(WIDTH, np.uint16)
    own = np.array((*said[1], *caller), np.uint16)
    words[: len(own)] = own
    words[WIDTH // 2 : WIDTH // 2 + len(own)] = (own.astype(np.uint32) * _MIX ^ model) % BUCKETS
    return Asked(numbers, words, crc32(own[: len(said[1])].tobytes()) & 0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows to learn from: numbers [n, len(ROW)], words [n, WIDTH], groups [n], log tokens [n]."""

    numbers: Floats
    words: Words
    groups: npt.NDArray[np.int64]
    log_tokens: Floats

    def __len__(self) -> int:
        return len(self.log_tokens)

    def head(self, count: int) -> "Table":
        return Table(self.numbers[:count], self.words[:count], self.groups[:count], self.log_tokens[:count])


class Examples:
    """`seen` counts all that were ever added."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._numbers = np.zeros((most, len(ROW)), np.float32)
        self._words = np.zeros((most, WIDTH), np.uint16)
        self._groups = np.zeros(most, np.int64)
        self._log_tokens = np.zeros(most, np.float32)
        self.seen = 0

    def __len__(self) -> int:
        return min(self.seen, self.most)

    def add(self, row: Asked, log_tokens: float) -> None:
        at = self.seen % self.most
        self._numbers[at] = row.numbers
        self._words[at] = row.words
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
            self._groups[order],
            self._log_tokens[order].astype(float),
        )

    def extend(self, table: Table) -> None:
        for at in range(max(0, len(table) - self.most), len(table)):
            row = Asked(table.numbers[at], table.words[at], int(table.groups[at]))
            self.add(row, float(table.log_tokens[at]))
