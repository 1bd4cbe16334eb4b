"""Columns of numbers, one row per request, so that each step updates all requests in vector operations.

Visiting request objects one by one mostly waits for memory: vLLM's own step has evicted them from the CPU
caches.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

Number = TypeVar("Number", np.int64, np.float64)

_FIRST_ROWS = 64


class ColumnStore(Generic[Number]):
    """`count` numbers per row, in an order kept by the caller; grows by doubling."""

    def __init__(self, count: int, kind: type[Number], rows: Sequence[Sequence[float]] = ()) -> None:
        self._all: npt.NDArray[Number] = np.zeros((count, max(_FIRST_ROWS, 2 * len(rows))), kind)
        if rows:
            self._all[:, : len(rows)] = np.array(rows, kind).T
        self._rows = len(rows)

    def __len__(self) -> int:
        return self._rows

    @property
    def filled(self) -> npt.NDArray[Number]:
        """View [column, row] of all rows; writable."""
        return self._all[:, : self._rows]

    def column(self, which: int) -> npt.NDArray[Number]:
        """View of one column."""
        found: npt.NDArray[Number] = self._all[which, : self._rows]
        return found

    def put(self, at: int, row: Sequence[float]) -> None:
        """Inserts a row before `at`."""
        rows = self._rows
        if rows == self._all.shape[1]:
            self._all = np.concatenate((self._all, np.zeros_like(self._all)), axis=1)
        if at < rows:
            self._all[:, at + 1 : rows + 1] = self._all[:, at:rows]
        self._all[:, at] = row
        self._rows = rows + 1

    def drop(self, at: int) -> None:
        """Removes a row."""
        rows = self._rows
        self._all[:, at : rows - 1] = self._all[:, at + 1 : rows]
        self._rows = rows - 1

    def select(self, rows: Sequence[int]) -> "ColumnStore[Number]":
        """A copy of these rows, in this order."""
        copied = ColumnStore(len(self._all), self._all.dtype.type)
        copied._all = np.concatenate((self._all[:, rows], copied._all), axis=1)
        copied._rows = len(rows)
        return copied
