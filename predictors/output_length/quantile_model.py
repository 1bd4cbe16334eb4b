"""The trained model behind the learned predictor: quantile regression on prompt features, fit and applied.

All targets are log tokens. If prompt vectors are known, kernel ridge gives a second estimate, and the
location is the mean of both. The estimates that train the trees are cross-validated over groups of equal
prompts, so the trees learn the spread of unseen prompts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from controlplane.core.memory_ledger import Floats
from predictors.output_length.examples import ROW, FeatureRow, Table
from predictors.output_length.features import BUCKETS
from predictors.output_length.kernel_ridge import KernelRidge, fit_kernel_ridge
from predictors.output_length.ridge import Ridge, fit_ridge
from predictors.output_length.trees import Trees, fit_trees

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
MEDIAN, UPPER = LEVELS.index(0.5), LEVELS.index(0.9)
ENOUGH = 200
"""Least number of examples; with fewer, the history of output lengths forecasts better."""

_FOLDS = 5


@dataclass(frozen=True, slots=True)
class LengthModel:
    """A fitted length model.

    Attributes:
        ridge: estimate from words and numbers.
        offsets: quantiles of the residuals at LEVELS, [levels].
        trees: how the quantiles vary with the features; None for constant offsets.
        kernel_ridge: second estimate from prompt vectors; None if too few were known.
    """

    ridge: Ridge
    offsets: Floats
    trees: Trees | None
    kernel_ridge: KernelRidge | None = None

    def predict(self, row: FeatureRow) -> Floats:
        """Quantiles of log tokens at LEVELS, [levels]; they may cross."""
        guesses = [float(self.ridge.predict(row.numbers, row.words))]
        if self.kernel_ridge is not None:
            is_known = row.vector.size == self.kernel_ridge.dimensions
            by_vector = self.kernel_ridge.predict(self.ridge, row.as_rows())[0] if is_known else guesses[0]
            guesses.append(float(by_vector))
        middle = sum(guesses) / len(guesses)
        found = middle + self.offsets
        if self.trees is None:
            return found
        return found + self.trees.predict(_tree_features(row.numbers[None], middle, guesses)[0])

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All parameters by name, for `model_from_arrays`."""
        parts: dict[str, Any] = {"ridge": self.ridge, "trees": self.trees, "likeness": self.kernel_ridge}
        found = {
            f"{name}.{field.name}": np.asarray(getattr(part, field.name))
            for name, part in parts.items()
            if part is not None
            for field in fields(part)
        }
        return {**found, "offsets": self.offsets}


def model_from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> LengthModel:
    """Inverse of `LengthModel.arrays`; raises KeyError or ValueError for other features or levels."""
    parts: dict[str, Any] = {f.name: arrays[f"ridge.{f.name}"] for f in fields(Ridge)}
    ridge = Ridge(**{**parts, "base": float(parts["base"])})
    trees = None
    if "trees.leaves" in arrays:
        trees = Trees(**{f.name: arrays[f"trees.{f.name}"] for f in fields(Trees)})
    kernel_ridge = None
    if "likeness.points" in arrays:
        parts = {f.name: arrays[f"likeness.{f.name}"] for f in fields(KernelRidge)}
        kernel_ridge = KernelRidge(**{**parts, "base": float(parts["base"])})
    model = LengthModel(ridge, arrays["offsets"], trees, kernel_ridge)
    if ridge.slopes.shape != (len(ROW),) or model.offsets.shape != (len(LEVELS),):
        raise ValueError(
            f"a model of {ridge.slopes.shape} numbers and {model.offsets.shape} levels; this version has "
            f"{len(ROW)} and {len(LEVELS)}"
        )
    return model


def fit(table: Table) -> LengthModel:
    """Trains a model; raises ValueError for fewer than ENOUGH rows."""
    if len(table) < ENOUGH:
        raise ValueError(f"{len(table)} examples; training needs at least {ENOUGH}; collect more")
    numbers, words, target = table.numbers, table.words, table.log_tokens
    fold = table.groups % _FOLDS
    guess = np.full(len(table), target.mean())
    for held in range(_FOLDS):
        out, rest = fold == held, fold != held
        if out.any() and rest.sum() > 1:
            guess[out] = fit_ridge(numbers[rest], words[rest], target[rest]).predict(numbers[out], words[out])
    ridge = fit_ridge(numbers, words, target)
    guesses, kernel_ridge = [guess], None
    known = np.flatnonzero(table.vectors.any(1))
    if len(known) >= ENOUGH:
        by_vector = guess.copy()
        kernel_ridge, by_vector[known] = fit_kernel_ridge(
            ridge, table.select(known), target[known], fold[known], _FOLDS
        )
        guesses.append(by_vector)
    middle = np.mean(guesses, 0)
    offsets = np.quantile(target - middle, LEVELS)
    rows = _tree_features(numbers, middle, guesses)
    trees = fit_trees(rows, target, middle[:, None] + offsets, np.array(LEVELS))
    return LengthModel(ridge, offsets, trees, kernel_ridge)


def _tree_features(numbers: Floats, middle: Floats | float, guesses: Sequence[Floats | float]) -> Floats:
    """Inputs of the trees: numbers, estimates and, if there are several, their mean."""
    seen = guesses if len(guesses) == 1 else [*guesses, middle]
    found: Floats = np.hstack([numbers, *(np.reshape(guess, (len(numbers), 1)) for guess in seen)])
    return found


@cache
def prior() -> LengthModel:
    """The shipped model, trained on public prompts; it uses numbers and cues but no words."""
    shipped = json.loads(files("predictors.output_length").joinpath("prior.json").read_text(encoding="utf-8"))
    slopes = np.array([float(shipped["slopes"].get(name, 0.0)) for name in ROW])
    center = np.array([float(shipped["center"].get(name, 0.0)) for name in ROW])
    nothing = np.zeros(BUCKETS, np.float32)
    scale = np.array([float(shipped["scale"].get(name, 1.0)) for name in ROW])
    ridge = Ridge(nothing, nothing, center, scale, slopes, float(shipped["base"]))
    return LengthModel(ridge, np.array([float(shipped["offsets"][str(level)]) for level in LEVELS]), None)
