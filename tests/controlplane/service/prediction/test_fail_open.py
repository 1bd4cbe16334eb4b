"""Exceptions in predictors and rate models never fail a request."""

import logging
from types import SimpleNamespace

import pytest

from controlplane.core.clock import milliseconds
from controlplane.core.engine_reports import EngineStep
from controlplane.core.ports import EmbeddingPass
from predictors.output_length.learned_predictor import LearnedLengths
from tests.controlplane.api.scripted_server import EMBED_MODEL, staged
from tests.controlplane.service.scripted_bench import read


class Defect(Exception):
    pass


def faulty(*_: object, **__: object) -> None:
    raise Defect("cannot be learned")


def tracebacks(caplog) -> int:
    return sum(record.exc_info is not None for record in caplog.records if record.levelno == logging.ERROR)


def failures(service, subject: str) -> float | None:
    registry = service.status.metrics.registry
    return registry.get_sample_value("tandem_predictor_failures_total", {"subject": subject})


@pytest.mark.parametrize(
    ("broken", "subject"),
    [("observe", "answer_length"), ("forecast", "length_forecast"), ("withdraw", "lost_answer")],
)
def test_a_failing_predictor_fails_no_request(bench, caplog, broken, subject):
    async def scenario(b):
        lengths: LearnedLengths = b.service.status.lengths
        setattr(lengths, broken, faulty)
        for _ in range(3):
            assert await read(await b.ask(max_tokens=40)) == "word " * 40
            leaving = await b.ask(max_tokens=40)
            await anext(leaving)
            await leaving.aclose()
        assert b.service.status.impaired() == {"learning": "defect"}
        delattr(lengths, broken)
        assert await read(await b.ask(max_tokens=40)) == "word " * 40
        await (await b.ask()).aclose()
        assert b.service.status.impaired() == {}

    b = bench(scenario)
    assert b.outcomes == ["met", "aborted"] * 4
    assert failures(b.service, subject) >= 3
    assert tracebacks(caplog) == 1


@pytest.mark.parametrize("broken", ["observe_step", "observe_prefill"])
def test_a_failing_pace_estimator_fails_no_request(bench, caplog, broken):
    async def scenario(b):
        setattr(b.service.gate.dispatcher.pace_estimators.llm, broken, faulty)
        for _ in range(2):
            assert await read(await b.ask(max_tokens=4)) == "word " * 4

    b = bench(scenario)
    assert b.outcomes == ["met", "met"]
    assert failures(b.service, "pace") >= 2
    assert tracebacks(caplog) == 1


def test_a_failing_ttft_predictor_fails_no_request(bench):
    async def scenario(b):
        b.service.gate.dispatcher.ttft.first_token = faulty
        assert await read(await b.ask(max_tokens=4)) == "word " * 4

    assert bench(scenario).outcomes == ["met"]


def test_a_failing_pace_estimator_ends_no_engine(bench):
    async def scenario(b):
        paces = b.service.gate.dispatcher.pace_estimators
        paces.llm.observe_work = paces.embedding.observe_pass = faulty
        b.generator.on_step(EngineStep(1, 1, 1, milliseconds(1)))
        b.embedder.on_pass(EmbeddingPass(1, 1, 1, milliseconds(1)))

    assert failures(bench(scenario).service, "pace") == 2


async def test_vectors_that_cannot_be_cached_are_sent_nevertheless():
    async with staged() as stage:
        stage.service.intake._prompt_vectors = SimpleNamespace(store=faulty)
        answer = await stage.http.post("/v1/embeddings", json={"model": EMBED_MODEL, "input": "hi"})
        assert answer.status_code == 200
        assert (await stage.http.get("/ready")).json()["impaired"] == {"learning": "defect"}
