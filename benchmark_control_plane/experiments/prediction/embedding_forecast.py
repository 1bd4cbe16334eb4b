"""Measures one-second forecasts of the embedding load: pinball loss and coverage on recorded arrivals.

    python -m benchmark_control_plane.experiments.prediction.embedding_forecast --data DIR

Each trace gives two series, requests and tokens per second. After the first minute, every second is
forecast from those before it: by the last value, by means of the last 10 and 60 (all three with the
quantiles of their own last 512 errors), by statsmodels' exponential smoothing (parameters by maximum
likelihood over the first 600 seconds; with its own normal errors, and with the same quantiles of errors),
and by `predictors.load.series`. No public trace of embedding requests exists: two series are generated from
production clients with outputs of one token, two are of retrieval and code prompts.
"""

import argparse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmark_control_plane.common.command_line import add_data, data_folder, print_json
from benchmark_control_plane.common.results_file import add_results
from benchmark_control_plane.judge.traces import NAMED, read_trace
from controlplane.core.memory_ledger import Floats
from predictors.load.series import LEVELS, SeriesForecaster

_LEVELS = np.array(LEVELS)
_WARM_UP = 60
_ERRORS_KEPT = 512
_FITTED_ON = 600
_BASELINES = ("last value", "mean of 10", "mean of 60")
_OWN = "tandem"


@dataclass(frozen=True, slots=True)
class EmbeddingTrace:
    """A trace: its name, the column with the tokens to embed, and the factor by which it is sped up."""

    name: str
    tokens: str = "prompt"
    speed: float = 1.0


# 7,106 retrievals in a week are one per 85 s; sped up 200 times, about 2 per second.
TRACES: Mapping[str, EmbeddingTrace] = {
    "ServeGen steady": EmbeddingTrace("servegen-steady"),
    "ServeGen bursty": EmbeddingTrace("servegen-bursty"),
    "RAGPulse x200": EmbeddingTrace("ragpulse", "query", 200.0),
    "Azure code": EmbeddingTrace("azure-code"),
}


class Forecaster(Protocol):
    """A one-step forecaster of a series, with quantiles at LEVELS."""

    def next_quantiles(self) -> Floats: ...

    def observe(self, value: float) -> None: ...


class Own:
    """`predictors.load.series` as served."""

    def __init__(self) -> None:
        self._series = SeriesForecaster()

    def next_quantiles(self) -> Floats:
        return np.array(self._series.quantiles)

    def observe(self, value: float) -> None:
        self._series.observe(value)


class WithErrors:
    """Precomputed point forecasts plus the quantiles of their last errors."""

    def __init__(self, points: Floats) -> None:
        self._points = points
        self._errors: list[float] = []

    def next_quantiles(self) -> Floats:
        recent = self._errors[-_ERRORS_KEPT:]
        # The largest of n errors bounds the next one with probability n / (n + 1).
        levels = np.minimum(1.0, _LEVELS * (1 + 1 / len(recent)))
        found: Floats = np.maximum(0.0, self._points[len(self._errors)] + np.quantile(recent, levels))
        return found

    def observe(self, value: float) -> None:
        self._errors.append(value - self._points[len(self._errors)])


class Normal:
    """Precomputed point forecasts plus normal quantiles of one deviation."""

    def __init__(self, points: Floats, deviation: float) -> None:
        self._points = iter(points)
        # Standard normal quantiles of 0.5, 0.9 and 0.99.
        self._spread = deviation * np.array((0.0, 1.2816, 2.3263))

    def next_quantiles(self) -> Floats:
        found: Floats = np.maximum(0.0, next(self._points) + self._spread)
        return found

    def observe(self, value: float) -> None:
        """Learns nothing."""


@dataclass(frozen=True, slots=True)
class Score:
    """By level: pinball loss over the series' mean, shares of values below and not above the quantile."""

    pinball: tuple[float, ...]
    below: tuple[float, ...]
    within: tuple[float, ...]

    @property
    def coverage_gap(self) -> float:
        """Largest distance of a level from the interval of both shares; 0 for exact quantiles."""
        return max(
            max(low - level, level - high, 0.0)
            for level, low, high in zip(LEVELS, self.below, self.within, strict=True)
        )


def score(forecaster: Forecaster, series: Floats) -> Score:
    """Scores a forecaster on a series; the first minute only initialises it."""
    loss, below, within = (np.zeros(len(LEVELS)) for _ in range(3))
    for step, value in enumerate(series):
        if step >= _WARM_UP:
            ahead = forecaster.next_quantiles()
            loss += np.where(value >= ahead, _LEVELS * (value - ahead), (1 - _LEVELS) * (ahead - value))
            below += value < ahead
            within += value <= ahead
        forecaster.observe(value)
    steps = len(series) - _WARM_UP
    return Score(
        tuple(loss / steps / np.mean(series)), tuple(below / steps), tuple(within / steps)
    )  # fmt: skip


def methods(series: Floats) -> Iterator[tuple[str, Forecaster]]:
    """All compared forecasters of a series, by name."""
    for name, length in zip(_BASELINES, (1, 10, 60), strict=True):
        yield name, WithErrors(_moving_mean(series, length))
    smoothed, deviation = _exponential_smoothing(series)
    yield "ETS, normal", Normal(smoothed[_WARM_UP:], deviation)
    yield "ETS, its errors", WithErrors(smoothed)
    yield _OWN, Own()


def _moving_mean(series: Floats, length: int) -> Floats:
    """Entry i is the mean of up to `length` values before i."""
    sums = np.concatenate(([0.0], np.cumsum(series)))
    at = np.arange(1, len(series))
    start = np.maximum(0, at - length)
    return np.concatenate(([0.0], (sums[at] - sums[start]) / (at - start)))


def _exponential_smoothing(series: Floats) -> tuple[Floats, float]:
    """One-step forecasts, and the standard deviation of their errors on the fitted part."""
    from statsmodels.tsa.exponential_smoothing.ets import ETSModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = series[:_FITTED_ON]
        parameters = ETSModel(first, error="add").fit(disp=False).params
        points = np.asarray(ETSModel(series, error="add").smooth(parameters).fittedvalues)
    return points, float(np.std(first - points[:_FITTED_ON]))


def series_of(folder: Path, trace: EmbeddingTrace) -> dict[str, Floats]:
    """Requests and tokens per second of a trace."""
    file, columns = NAMED[trace.name]
    rows = read_trace(folder / file, columns)
    second = (np.array([row.at for row in rows]) / trace.speed).astype(int)
    weights = np.array([getattr(row, trace.tokens) for row in rows], dtype=float)
    return {
        "requests": np.bincount(second).astype(float),
        "tokens": np.bincount(second, weights=weights),
    }


def study(folder: Path) -> list[dict[str, Any]]:
    """Scores all methods on both series of every trace."""
    rows: list[dict[str, Any]] = []
    for name, trace in TRACES.items():
        for kind, series in series_of(folder, trace).items():
            scores = {method: score(forecaster, series) for method, forecaster in methods(series)}
            best = np.min([scores[method].pinball for method in _BASELINES], axis=0)
            rows.append(
                {
                    "trace": name,
                    "series": kind,
                    "seconds": len(series),
                    "mean": float(series.mean()),
                    "dispersion": float(series.var() / series.mean()),
                    "to_best_baseline": [float(r) for r in scores[_OWN].pinball / best],
                    "scores": {
                        method: {
                            "pinball": s.pinball, "below": s.below, "within": s.within,
                            "coverage_gap": s.coverage_gap,
                        }
                        for method, s in scores.items()
                    },
                }
            )  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_data(parser)
    add_results(parser)
    options = parser.parse_args(arguments)
    return print_json(lambda: study(data_folder(options.data, "traces")), options.results)


if __name__ == "__main__":
    raise SystemExit(main())
