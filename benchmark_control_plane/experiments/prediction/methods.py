"""Defines the methods of length prediction that are compared: constant, history, TF-IDF ridge and learned.

All methods learn from the same samples. The TF-IDF ridges also get the model's name, and take their
quantiles from the residuals of held-out prompts; one works on token counts, one on their logarithm.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from benchmark_control_plane.experiments.prediction.prompt_sets import PromptSample
from benchmark_control_plane.experiments.prediction.prompt_vectors import without_vectors
from controlplane.core.forecast import LengthForecast
from controlplane.core.memory_ledger import Floats
from controlplane.core.ports import LengthPredictor
from predictors.output_length.history_predictor import HistoryQuantiles
from predictors.output_length.learned_predictor import LearnedLengths
from predictors.output_length.quantile_model import ENOUGH, LEVELS, fit

REMEMBER = 16_384
_FOLDS = 5


class Method(Protocol):
    """Learns from `known` and returns quantiles for `tested`, shape [samples, LEVELS]."""

    def __call__(self, known: Sequence[PromptSample], tested: Sequence[PromptSample]) -> Floats: ...


def constant(known: Sequence[PromptSample], tested: Sequence[PromptSample]) -> Floats:
    """The quantiles of all known outputs, for every request."""
    return np.tile(np.quantile(_tokens(known), LEVELS), (len(tested), 1))


def history(known: Sequence[PromptSample], tested: Sequence[PromptSample]) -> Floats:
    """Quantiles of recent outputs, as served: each output is observed after its forecast."""
    predictor = HistoryQuantiles()
    train(predictor, known)
    return quantiles_of(predictor, tested)


def learned(known: Sequence[PromptSample], tested: Sequence[PromptSample]) -> Floats:
    """The learned predictor without prompt vectors, not retrained on `tested`."""
    return quantiles_of(learned_predictor(without_vectors(known)), without_vectors(tested))


def encoded(known: Sequence[PromptSample], tested: Sequence[PromptSample]) -> Floats:
    """The learned predictor with prompt vectors."""
    return quantiles_of(learned_predictor(known), tested)


def learned_predictor(known: Sequence[PromptSample]) -> LearnedLengths:
    """Trained on `known`, without the shipped prior, which was learned from these prompts."""
    predictor = LearnedLengths(max_examples=REMEMBER, use_prior=False)
    train(predictor, known)
    # Below ENOUGH examples no model is fitted and history is used, as in the service.
    if len(predictor.examples) >= ENOUGH:
        predictor.swap(fit(predictor.examples.table()))
    return predictor


def ridge(known: Sequence[PromptSample], tested: Sequence[PromptSample], *, logarithm: bool) -> Floats:
    """Ridge regression on TF-IDF words and the model's name, with quantiles of cross-validated residuals."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import GroupKFold, cross_val_predict

    models = sorted({sample.model for sample in known})
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True, max_features=50_000)

    def rows(samples: Sequence[PromptSample], words: Any) -> Any:
        return hstack([words, csr_matrix([[float(s.model == m) for m in models] for s in samples])]).tocsr()

    learning = rows(known, vectorizer.fit_transform([sample.prompt for sample in known]))
    target = np.log(_tokens(known)) if logarithm else _tokens(known)
    groups = [sample.fold(1 << 31) for sample in known]
    held_out = cross_val_predict(Ridge(1.0), learning, target, cv=GroupKFold(_FOLDS), groups=groups)
    predicted = (
        Ridge(1.0)
        .fit(learning, target)
        .predict(rows(tested, vectorizer.transform([s.prompt for s in tested])))
    )
    found: Floats = predicted[:, None] + np.quantile(target - held_out, LEVELS)
    return np.exp(found) if logarithm else np.maximum(found, 1.0)


METHODS: dict[str, Method] = {
    "constant": constant,
    "history": history,
    "tf-idf ridge": partial(ridge, logarithm=False),
    "tf-idf ridge, log": partial(ridge, logarithm=True),
    "learned": learned,
    "learned, encoder": encoded,
}


def train(predictor: LengthPredictor, known: Sequence[PromptSample]) -> None:
    """Lets the predictor observe all samples."""
    for sample in known:
        request = sample.request()
        predictor.forecast(request)
        predictor.observe(request, sample.tokens)


def quantiles_of(predictor: LengthPredictor, tested: Sequence[PromptSample]) -> Floats:
    """Quantiles of `forecasts`, shape [samples, LEVELS]."""
    return np.array([at_levels(forecast) for forecast in forecasts(predictor, tested)])


def forecasts(predictor: LengthPredictor, tested: Sequence[PromptSample]) -> list[LengthForecast]:
    """Forecasts each sample, then lets the predictor observe its output."""
    found = []
    for sample in tested:
        request = sample.request()
        found.append(predictor.forecast(request))
        predictor.observe(request, sample.tokens)
    return found


def at_levels(forecast: LengthForecast) -> list[float]:
    return [forecast.quantile(level) for level in LEVELS]


def pinball_losses(quantiles: Floats, tokens: Floats) -> Floats:
    """Pinball loss of each row, mean over LEVELS."""
    missed = tokens[:, None] - quantiles
    levels = np.array(LEVELS)
    found: Floats = np.maximum(levels * missed, (levels - 1) * missed).mean(1)
    return found


def _tokens(samples: Sequence[PromptSample]) -> Floats:
    return np.array([float(sample.tokens) for sample in samples])
