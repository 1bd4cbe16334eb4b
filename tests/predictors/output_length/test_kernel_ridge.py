"""Tests of kernel ridge on prompt vectors and of its cross-validated predictions."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from predictors.output_length.checkpoint import Checkpoint, read, save
from predictors.output_length.examples import feature_row, model_buckets
from predictors.output_length.features import bucket
from predictors.output_length.kernel_ridge import _solved
from predictors.output_length.learned_predictor import LearnedLengths
from predictors.output_length.quantile_model import MEDIAN, fit

DIMENSIONS = 12


def vector_of(rng, topic):
    center = np.random.default_rng(topic).normal(size=DIMENSIONS)
    found = center + 0.1 * rng.normal(size=DIMENSIONS)
    return found / np.linalg.norm(found)


@pytest.fixture
def asked(a_request):
    """A request with an uninformative prompt; its vector gives one of five topics, hence the length."""

    def build(rng, topic, *, with_vector=True):
        request = a_request(prompt="tell me", max_tokens=8_000)
        vector = vector_of(rng, topic).astype(np.float16).tobytes() if with_vector else b""
        features = replace(
            request.features, vector=vector, words=(*request.features.words, int(rng.integers(1, 30_000)))
        )
        return replace(request, features=features)

    return build


def test_vectors_improve_forecasts_and_are_optional(asked, tmp_path):
    rng, random = np.random.default_rng(0), Random(0)
    lengths = LearnedLengths(use_prior=False)
    for _ in range(400):
        topic = random.randrange(5)
        request = asked(rng, topic)
        lengths.forecast(request)
        lengths.observe(request, round(30 * 2**topic * random.lognormvariate(0, 0.2)))
    lengths.swap(fit(lengths.examples.table()))
    short, long = (lengths.forecast(asked(rng, topic)).quantile(0.5) for topic in (0, 4))
    assert (short, long) == (pytest.approx(30, rel=0.35), pytest.approx(480, rel=0.35))
    unknown = lengths.forecast(asked(rng, 0, with_vector=False)).quantile(0.5)
    assert short < unknown < long

    save(
        tmp_path / "kept.npz",
        Checkpoint(lengths.examples.table(), lengths.model, lengths.calibration_state()),
    )
    kept = read(tmp_path / "kept.npz").model
    row = lengths._pending[next(reversed(lengths._pending))].row
    assert kept is not None and kept.predict(row)[MEDIAN] == pytest.approx(lengths.model.predict(row)[MEDIAN])


def test_the_model_is_found_behind_a_word_whose_hash_is_0(a_request):
    assert bucket("class were") == 0
    rows = [feature_row(a_request(prompt=prompt), 0.0, 0.0) for prompt in ("the class were late", "hello")]
    assert model_buckets(np.stack([row.words for row in rows])).tolist() == 2 * [bucket("model=llm")]


def test_each_column_uses_only_its_own_rows():
    rng = np.random.default_rng(1)
    points = rng.normal(size=(40, 3))
    near = np.exp(-((points[:, None] - points) ** 2).sum(2)).astype(np.float32)
    used = rng.random((40, 2)) < 0.7
    target = rng.normal(size=40).astype(np.float32)
    weights = _solved(near, used, used * target[:, None])
    for column in (0, 1):
        rows = used[:, column]
        exact = np.linalg.solve(near[np.ix_(rows, rows)] + 0.3 * np.eye(rows.sum()), target[rows])
        assert weights[rows, column] == pytest.approx(exact, abs=1e-3)
        assert not weights[~rows, column].any()
