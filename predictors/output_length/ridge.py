"""Which words make answers long? Ridge regression of log tokens on hashed words and numbers.

Rule: rows of words weigh by rarity and have length one; numbers are standardised. The normal equations
are solved by conjugate gradients, which needs no matrix but the rows themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from controlplane.core.memory import Floats
from predictors.output_length.features import BUCKETS

Words = npt.NDArray[np.uint16]
"""[rows, width] of buckets; unused places hold 0, and bucket 0 weighs nothing."""

# Numbers are few and each is in every row, so noise in them costs more.
_WORD_PENALTY, _NUMBER_PENALTY = 1.0, 60.0
_STEPS = 40
_MAX_STANDARDISED = 3.0


@dataclass(frozen=True, slots=True)
class Ridge:
    rarity: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    center: Floats
    scale: Floats
    slopes: Floats
    base: float

    def predict(self, numbers: Floats, words: Words) -> Floats:
        """Log tokens of each row."""
        rarity = self.rarity[words]
        length = np.sqrt(np.square(rarity).sum(-1))
        said = (rarity * self.weights[words]).sum(-1) / np.maximum(length, 1e-9)
        found: Floats = self.base + said + standard(numbers, self.center, self.scale) @ self.slopes
        return found


def standard(numbers: Floats, center: Floats, scale: Floats) -> Floats:
    """Clipped: what was rare in training must not rule a forecast."""
    found: Floats = np.clip((numbers - center) / scale, -_MAX_STANDARDISED, _MAX_STANDARDISED)
    return found


def fit_ridge(numbers: Floats, words: Words, target: Floats) -> Ridge:
    count = np.bincount(words.ravel(), minlength=BUCKETS).astype(float)
    count[0] = 0.0
    # A word seen once cannot be told from noise.
    rarity = np.where(count > 1, np.log((1 + len(words)) / (1 + count)) + 1, 0.0).astype(np.float32)
    center, scale = numbers.mean(0), numbers.std(0)
    scale = np.where(scale > 1e-9, scale, 1.0)
    dense = standard(numbers, center, scale)
    values = rarity[words]
    values /= np.maximum(np.sqrt(np.square(values).sum(1, keepdims=True)), 1e-9)
    row, _ = np.nonzero(values)
    column, value = words[values > 0], values[values > 0].astype(float)
    base = float(target.mean())

    def forward(sparse: Floats, slopes: Floats) -> Floats:
        found: Floats = np.bincount(row, value * sparse[column], len(words)) + dense @ slopes
        return found

    def backward(residual: Floats) -> tuple[Floats, Floats]:
        words_part: Floats = np.bincount(column, value * residual[row], BUCKETS).astype(float)
        return words_part, dense.T @ residual

    sparse, slopes = _solved(forward, backward, target - base, dense.shape[1])
    return Ridge(rarity, sparse.astype(np.float32), center, scale, slopes, base)


def _solved(
    forward: Callable[[Floats, Floats], Floats],
    backward: Callable[[Floats], tuple[Floats, Floats]],
    target: Floats,
    width: int,
) -> tuple[Floats, Floats]:
    """Conjugate gradients on the normal equations."""
    found = np.zeros(BUCKETS + width)
    penalty = np.repeat((_WORD_PENALTY, _NUMBER_PENALTY), (BUCKETS, width))
    residual = np.concatenate(backward(target))
    direction = residual.copy()
    size = float(residual @ residual)
    for _ in range(_STEPS):
        if size < 1e-8:
            break
        image = forward(direction[:BUCKETS], direction[BUCKETS:])
        curved = np.concatenate(backward(image)) + penalty * direction
        step = size / float(direction @ curved)
        found += step * direction
        residual -= step * curved
        size, before = float(residual @ residual), size
        direction = residual + size / before * direction
    return found[:BUCKETS], found[BUCKETS:]
