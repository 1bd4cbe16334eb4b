"""The live feed compares engine steps and embedding passes with what their models expect."""

import json

import pytest

from backends.testing.scripted import ScriptedEmbedder
from controlplane.core.clock import milliseconds
from controlplane.core.engine_reports import EngineStep


def calibration(bench) -> dict[str, dict[str, dict[str, float]]]:
    """That of a new sample."""
    bench.service.live.sample()
    return json.loads(bench.service.live.since(0, "test"))["records"][-1]["calibration"]


def test_steps_and_passes_are_compared_by_model(bench):
    async def scenario(b):
        before = calibration(b)
        assert before["step_time"] == before["pass_time"] == {"ratio": {}, "error": {}}
        for took in (10, 30) * 20:
            b.generator.on_step(EngineStep(0, 4, 4_000, milliseconds(took)))
        await b.embed("a" * 100)
        b.embedder._token_seconds *= 2
        await b.embed("a" * 100)
        found = calibration(b)
        steps = b.service.status.dispatcher.pace_estimators.llm.steps.calibration
        of_steps, of_passes = found["step_time"], found["pass_time"]
        assert of_steps["ratio"] == {b.generator.model: pytest.approx(steps.ratio, abs=1e-4)}
        assert 0.2 < of_steps["error"][b.generator.model] < 1
        # One pass took as long as expected, the next one twice as long.
        assert of_passes["ratio"] == {b.embedder.model: pytest.approx(1.5, abs=0.01)}
        assert of_passes["error"] == {b.embedder.model: pytest.approx(0.5, abs=0.01)}

    bench(scenario, embedder=ScriptedEmbedder(token_seconds=1e-3))
