"""How long were the answers to prompts like this one? Ridge regression with a Gaussian kernel.

Rule: a request is a point: the vector that an embedding model made of its prompt, along the directions in
which prompts differ most; its numbers, which count little each; its model. Its guess is a weighted sum
over all requests learned from, each counting by how near it is. The weights are found by conjugate
gradients, of all rows and of all but each fold at once: so the guess for a row comes as it would have
been without the row and those like it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from controlplane.core.memory import Floats
from predictors.output_length.examples import Rows, model_buckets
from predictors.output_length.ridge import Ridge, standard

_AXES = 192
_TEXT, _NUMBER, _MODEL = 2.0, 0.12, 1.6
_MODEL_BITS = np.arange(16, dtype=np.uint64)
_SCATTER = np.uint64(2_654_435_761)
_NARROWNESS, _PENALTY = 0.3, 0.3
_STEPS = 60
_BLOCK = 1_024

Singles = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KernelRidge:
    """`directions` [dimensions, axes] are of vectors around `center`; `points` [rows, axes of a point]."""

    center: Singles
    directions: Singles
    points: Singles
    weights: Singles
    base: float

    def predict(self, ridge: Ridge, rows: Rows) -> Floats:
        """Log tokens of each row, all with vectors; `ridge` knows the numbers' usual size."""
        points = _points(self.center, self.directions, ridge, rows)
        found: Floats = self.base + (_closeness(points, self.points) @ self.weights).astype(float)
        return found

    @property
    def dimensions(self) -> int:
        return len(self.center)


def fit_kernel_ridge(
    ridge: Ridge, rows: Rows, target: Floats, fold: npt.NDArray[np.int64], folds: int
) -> tuple[KernelRidge, Floats]:
    """What was learned of all rows, and the guess for each row of what was learned without its fold."""
    vectors = rows.vectors.astype(np.float32)
    center = vectors.mean(0)
    _, axes = np.linalg.eigh((vectors - center).T @ (vectors - center))
    directions = np.ascontiguousarray(axes[:, ::-1][:, :_AXES])
    points = _points(center, directions, ridge, rows)
    near = np.empty((len(points), len(points)), np.float32)
    for at in range(0, len(points), _BLOCK):
        near[at : at + _BLOCK] = _closeness(points[at : at + _BLOCK], points)
    base = float(target.mean())
    used = np.concatenate([fold[:, None] != np.arange(folds), np.ones((len(points), 1), bool)], 1)
    weights = _solved(near, used, used * (target - base).astype(np.float32)[:, None])
    guess: Floats = base + (near @ weights)[np.arange(len(points)), fold].astype(float)
    return KernelRidge(center, directions, points, weights[:, folds].copy(), base), guess


def _points(center: Singles, directions: Singles, ridge: Ridge, rows: Rows) -> Singles:
    numbers = _NUMBER * standard(rows.numbers, ridge.center, ridge.scale)
    text = _TEXT * ((rows.vectors.astype(np.float32) - center) @ directions)
    return np.hstack([text, numbers, _MODEL * _signs(model_buckets(rows.words))]).astype(np.float32)


def _signs(models: npt.NDArray[np.uint16]) -> Floats:
    """As far apart for any two models as their hashes differ, about 1."""
    scattered = (models.astype(np.uint64) * _SCATTER) >> np.uint64(8)
    bits = (scattered[:, None] >> _MODEL_BITS) & np.uint64(1)
    found: Floats = (2.0 * bits - 1.0) / np.sqrt(2 * len(_MODEL_BITS))
    return found


def _closeness(ones: Singles, others: Singles) -> Singles:
    """[ones, others], from 0 to 1."""
    apart = np.square(others).sum(1) - 2 * (ones @ others.T)
    apart += np.square(ones).sum(1)[:, None]
    apart *= -_NARROWNESS
    found: Singles = np.exp(np.minimum(apart, 0.0, out=apart), out=apart)
    return found


def _solved(near: Singles, used: npt.NDArray[np.bool_], wanted: Singles) -> Singles:
    """A column of weights for each column of `used`, which says what rows it may learn from."""
    found = np.zeros_like(wanted)
    residual = wanted.copy()
    direction = wanted.copy()
    size = np.square(residual).sum(0)
    for _ in range(_STEPS):
        if (size < 1e-6).all():
            break
        curved = used * (near @ direction) + _PENALTY * direction
        step = size / np.maximum((direction * curved).sum(0), 1e-12)
        found += step * direction
        residual -= step * curved
        size, before = np.square(residual).sum(0), size
        direction = residual + size / np.maximum(before, 1e-12) * direction
    return found
