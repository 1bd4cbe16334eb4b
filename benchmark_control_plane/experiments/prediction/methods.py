"""Whom must a length predictor beat? Ways of forecasting, all asked and told the same.

The ridges on TF-IDF know the model's name too, and get their quantiles from the residuals of prompts that
they had not seen; on tokens as they are, and on their logarithm.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from benchmark_control_plane.experiments.prediction.prompt_sets import PromptSample
from benchmark_control_plane.experiments.prediction.prompt_vectors import without_vectors
from controlplane.core.forecast import LengthForecast
from controlplane.core.memory import Floats
from controlplane.core.ports import LengthPredictor
from predictors.output_length.history import HistoryQuantiles
from predictors.output_length.learned import LearnedLengths
from predictors.output_length.model import ENOUGH, LEVELS, fit

REMEMBER = 16_384
_FOLDS = 5


class Method(Protocol):
    """Learns from samples, then says quantiles of others: [samples, LEVELS]."""

    def __call__(self, known: Sequence[PromptSample], asked: Sequence[PromptSample]) -> Floats: ...


def constant(known: Sequence[PromptSample], asked: Sequence[PromptSample]) -> Floats:
    return np.tile(np.quantile(_tokens(known), LEVELS), (len(asked), 1))


def history(known: Sequence[PromptSample], asked: Sequence[PromptSample]) -> Floats:
    """As served: it sees each answer after its forecast."""
    predictor = HistoryQuantiles()
    taught(predictor, known)
    return stated(predictor, asked)


def learned(known: Sequence[PromptSample], asked: Sequence[PromptSample]) -> Floats:
    """As served, but for learning no other model on the way."""
    return stated(learned_predictor(without_vectors(known)), without_vectors(asked))


def encoded(known: Sequence[PromptSample], asked: Sequence[PromptSample]) -> Floats:
    """The same, with every prompt's vector."""
    return stated(learned_predictor(known), asked)


def learned_predictor(known: Sequence[PromptSample]) -> LearnedLengths:
    """Without the shipped priors, which were learned from these very prompts."""
    predictor = LearnedLengths(remember=REMEMBER, use_prior=False)
    taught(predictor, known)
    # Fewer teach no model; history then decides, as it does when served.
    if len(predictor.examples) >= ENOUGH:
        predictor.swap(fit(predictor.examples.table()))
    return predictor


def ridge(known: Sequence[PromptSample], asked: Sequence[PromptSample], *, logarithm: bool) -> Floats:
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import GroupKFold, cross_val_predict

    models = sorted({sample.model for sample in known})
    words = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True, max_features=50_000)

    def rows(samples: Sequence[PromptSample], said: Any) -> Any:
        return hstack([said, csr_matrix([[float(s.model == m) for m in models] for s in samples])]).tocsr()

    learning = rows(known, words.fit_transform([sample.prompt for sample in known]))
    target = np.log(_tokens(known)) if logarithm else _tokens(known)
    groups = [sample.fold(1 << 31) for sample in known]
    guess = cross_val_predict(Ridge(1.0), learning, target, cv=GroupKFold(_FOLDS), groups=groups)
    said = Ridge(1.0).fit(learning, target).predict(rows(asked, words.transform([s.prompt for s in asked])))
    found: Floats = said[:, None] + np.quantile(target - guess, LEVELS)
    return np.exp(found) if logarithm else np.maximum(found, 1.0)


METHODS: dict[str, Method] = {
    "constant": constant,
    "history": history,
    "tf-idf ridge": partial(ridge, logarithm=False),
    "tf-idf ridge, log": partial(ridge, logarithm=True),
    "learned": learned,
    "learned, encoder": encoded,
}


def taught(predictor: LengthPredictor, known: Sequence[PromptSample]) -> None:
    for sample in known:
        request = sample.request()
        predictor.forecast(request)
        predictor.observe(request, sample.tokens)


def stated(predictor: LengthPredictor, asked: Sequence[PromptSample]) -> Floats:
    """Each forecast before its answer is shown."""
    return np.array([at_levels(forecast) for forecast in forecasts(predictor, asked)])


def forecasts(predictor: LengthPredictor, asked: Sequence[PromptSample]) -> list[LengthForecast]:
    found = []
    for sample in asked:
        request = sample.request()
        found.append(predictor.forecast(request))
        predictor.observe(request, sample.tokens)
    return found


def at_levels(forecast: LengthForecast) -> list[float]:
    return [forecast.quantile(level) for level in LEVELS]


def pinball_losses(quantiles: Floats, tokens: Floats) -> Floats:
    """Of each row, its mean over LEVELS."""
    missed = tokens[:, None] - quantiles
    levels = np.array(LEVELS)
    found: Floats = np.maximum(levels * missed, (levels - 1) * missed).mean(1)
    return found


def _tokens(samples: Sequence[PromptSample]) -> Floats:
    return np.array([float(sample.tokens) for sample in samples])
