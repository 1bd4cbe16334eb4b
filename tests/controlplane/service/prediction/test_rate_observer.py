"""Whether a step of the engine trains the step-time model as one without embeddings."""

import pytest

from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from controlplane.core.clock import milliseconds
from controlplane.core.engine_reports import EngineStep
from controlplane.core.ports import EmbeddingPass
from controlplane.core.request import Owner
from controlplane.metrics import Metrics
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.prediction.fail_open import FailOpen
from controlplane.service.prediction.rate_observer import RateObserver
from controlplane.service.runtime.timers import MonotonicClock
from predictors.timing.online_step_time import ObservedPace

STEP = EngineStep(0, 8, 1_000, milliseconds(10))
LONG = EngineStep(300, 8, 1_000, milliseconds(500))
PASS = EmbeddingPass(16, 1_000, 1_024, milliseconds(300))


def test_a_pass_that_ended_during_the_step_makes_it_shared():
    """The pass is over when the step is reported, but the step was longer because of it."""
    model, metrics = ObservedPace(), Metrics()
    generator = ScriptedGenerator()
    embedder = ScriptedEmbedder()
    observer = RateObserver(
        MonotonicClock(),
        {Owner.LLM: model, Owner.EMBEDDING: ObservedPace()},
        lambda: None,
        EncoderRegistry([embedder]),
        metrics,
        FailOpen(metrics),
    )
    observer.attach({generator.model: generator})
    for _ in range(40):
        generator.on_step(STEP)
    per_prompt_token = model.steps.per_prompt_token
    for _ in range(40):
        embedder.on_pass(PASS)
        assert not embedder.is_computing
        generator.on_step(LONG)
    assert model.steps.per_prompt_token == pytest.approx(per_prompt_token)
    generator.on_step(LONG)
    assert model.steps.per_prompt_token > 1.1 * per_prompt_token
