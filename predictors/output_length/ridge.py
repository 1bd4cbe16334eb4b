"""Ridge regression of log output tokens on hashed words and numeric features.

Words are weighted by inverse document frequency and each row is scaled to unit length; numbers are
standardised. The normal equations are solved by conjugate gradients, which needs only products with the rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from controlplane.core.memory_ledger import Floats
from predictors.output_length.features import BUCKETS

Words = npt.NDArray[np.uint16]
"""Hash buckets, [rows, width]; unused places hold 0, and bucket 0 has weight 0."""

# Numbers are few and present in every row, so noise in their coefficients costs more.
_WORD_PENALTY, _NUMBER_PENALTY = 1.0, 60.0
_STEPS = 40
_MAX_STANDARDISED = 3.0


@dataclass(frozen=True, slots=True)
class Ridge:
    """A fitted model.

    Attributes:
        rarity: inverse document frequency of each bucket, [BUCKETS].
        weights: coefficient of each bucket, [BUCKETS].
        center: means of the numbers.
        scale: deviations of the numbers.
        slopes: coefficients of the standardised numbers.
        base: mean of the targets.
    """

    rarity: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    center: Floats
    scale: Floats
    slopes: Floats
    base: float

    def predict(self, numbers: Floats, words: Words) -> Floats:
        """Log tokens of each row; a single row gives a scalar."""
        rarity = self.rarity[words]
        length = np.sqrt(np.square(rarity).sum(-1))
        word_part = (rarity * self.weights[words]).sum(-1) / np.maximum(length, 1e-9)
        found: Floats = self.base + word_part + standard(numbers, self.center, self.scale) @ self.slopes
        return found


def standard(numbers: Floats, center: Floats, scale: Floats) -> Floats:
    """Standardised numbers, clipped so that values that were rare in training cannot dominate."""
    # `numpy.clip` takes three times as long for one row.
    found: Floats = np.maximum((numbers - center) / scale, -_MAX_STANDARDISED)
    np.minimum(found, _MAX_STANDARDISED, out=found)
    return found


def fit_ridge(numbers: Floats, words: Words, target: Floats) -> Ridge:
    """Fits numbers [rows, features] and words [rows, width] to log tokens [rows]."""
    count = np.bincount(words.ravel(), minlength=BUCKETS).astype(float)
    count[0] = 0.0
    # A word seen once cannot be distinguished from noise.
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
    """Coefficients of words and numbers, by conjugate gradients on the normal equations."""
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
