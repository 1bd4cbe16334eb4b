"""What steps of the engine and embedding passes teach the models of their times."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from controlplane.core.clock import milliseconds
from controlplane.core.engine_reports import EngineStep
from controlplane.core.ports import EmbeddingPass, PauseCost
from controlplane.metrics import Metrics
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.prediction.backend_observer import BackendObserver
from controlplane.service.prediction.fail_open import FailOpen
from controlplane.service.runtime.timers import MonotonicClock
from predictors.timing.embedding_pace import ModelPaces
from predictors.timing.online_step_time import ObservedPace
from predictors.timing.pace_estimators import PaceEstimators

STEP = EngineStep(0, 8, 1_000, milliseconds(10))
LONG = EngineStep(300, 8, 1_000, milliseconds(500))
PASS = EmbeddingPass(16, 1_000, 1_024, milliseconds(300))


class Bench:
    """An engine and an embedding model under observation; 40 steps of 10 ms have ended."""

    def __init__(self, pause_cost: Callable[[], PauseCost | None] = lambda: None) -> None:
        self.model, metrics = ObservedPace(), Metrics()
        self.generator, self.embedder = ScriptedGenerator(), ScriptedEmbedder()
        observer = BackendObserver(
            MonotonicClock(),
            PaceEstimators(self.model, ModelPaces([self.embedder])),
            pause_cost,
            EncoderRegistry([self.embedder]),
            metrics,
            FailOpen(metrics),
        )
        observer.attach({self.generator.model: self.generator})
        for _ in range(40):
            self.generator.on_step(STEP)


def test_a_pass_that_ended_during_the_step_makes_it_shared():
    """The pass is over when the step is reported, but the step was longer because of it."""
    bench = Bench()
    per_prompt_token = bench.model.steps.per_prompt_token
    for _ in range(40):
        bench.embedder.on_pass(PASS)
        assert not bench.embedder.is_computing
        bench.generator.on_step(LONG)
    assert bench.model.steps.per_prompt_token == pytest.approx(per_prompt_token)
    bench.generator.on_step(LONG)
    assert bench.model.steps.per_prompt_token > 1.1 * per_prompt_token


def test_only_a_pass_with_a_cost_shows_what_passes_delay():
    """One without began while no generation ran, or in the idle class."""
    bench = Bench()
    for _ in range(40):
        bench.embedder.on_pass(PASS)
    assert bench.model.pass_delay == 1.0
    for _ in range(200):
        bench.generator.on_step(STEP._replace(took=milliseconds(12)))
        bench.embedder.on_pass(replace(PASS, priced=milliseconds(8)))
    assert bench.model.pass_delay == pytest.approx(2 / 8, abs=0.03)


def test_a_defect_in_the_price_of_a_pause_does_not_reach_the_worker(caplog: pytest.LogCaptureFixture):
    def faulty() -> None:
        raise ZeroDivisionError("a defect")

    assert Bench(faulty).embedder.pause_cost() is None
    assert "a defect" in caplog.text
