"""Predicts log output tokens from prompt embeddings by ridge regression with a Gaussian kernel.

A request is a point of three parts: the embedding of its prompt on the leading principal axes, the numeric
features with a small weight, and a code of its model. The prediction is a weighted sum over the training
points, weighted by the kernel. The weights are solved by conjugate gradients for all rows and, at the same
time, for all rows outside each fold, which gives cross-validated predictions of the training rows.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from controlplane.core.memory_ledger import Floats
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
    """A fitted model.

    Attributes:
        center: mean of the training vectors, [dimensions].
        directions: principal axes, [dimensions, axes].
        points: training points, [rows, axes of a point].
        weights: dual coefficients, [rows].
        base: mean of the targets.
    """

    center: Singles
    directions: Singles
    points: Singles
    weights: Singles
    base: float

    def predict(self, ridge: Ridge, rows: Rows) -> Floats:
        """Log tokens of each row; every row must have a vector. `ridge` standardises the numbers."""
        points = _points(self.center, self.directions, ridge, rows)
        found: Floats = self.base + (_closeness(points, self.points) @ self.weights).astype(float)
        return found

    @property
    def dimensions(self) -> int:
        """Dimensions of the vectors."""
        return len(self.center)


def fit_kernel_ridge(
    ridge: Ridge, rows: Rows, target: Floats, fold: npt.NDArray[np.int64], folds: int
) -> tuple[KernelRidge, Floats]:
    """Fits the model on all rows, and predicts each row from the rows outside its fold.

    Args:
        ridge: standardises the numbers.
        rows: training rows, all with vectors.
        target: log tokens, [rows].
        fold: fold of each row, [rows].
        folds: number of folds.

    Returns:
        The model, and the cross-validated predictions [rows].
    """
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
    """Code of +-1 bits of each model's hash; two models are about 1 apart."""
    scattered = (models.astype(np.uint64) * _SCATTER) >> np.uint64(8)
    bits = (scattered[:, None] >> _MODEL_BITS) & np.uint64(1)
    found: Floats = (2.0 * bits - 1.0) / np.sqrt(2 * len(_MODEL_BITS))
    return found


def _closeness(rows: Singles, others: Singles) -> Singles:
    """Gaussian kernel matrix [rows, others], entries from 0 to 1."""
    apart = np.square(others).sum(1) - 2 * (rows @ others.T)
    apart += np.square(rows).sum(1)[:, None]
    apart *= -_NARROWNESS
    found: Singles = np.exp(np.minimum(apart, 0.0, out=apart), out=apart)
    return found


def _solved(near: Singles, used: npt.NDArray[np.bool_], wanted: Singles) -> Singles:
    """Conjugate gradients for one system per column; `used` masks the rows that a column may use."""
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
