"""Shares of the memory in a replay, on cases with a known result."""

from dataclasses import replace

import pytest

from benchmark_control_plane.experiments.engine.engine_replay import EngineVariant, ReplayWindow, play
from benchmark_control_plane.experiments.engine.offered_load import (
    THREE_CLASSES,
    EmbeddingsBeside,
    Offer,
    TokenObjectives,
)

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

OBJECTIVES = TokenObjectives(ttft=1.0, gap=1.0)


@pytest.fixture(scope="module")
def engine():
    from backends.vllm.simulation.stepped_engine import SteppedEngine, SteppedEngineSetup

    return SteppedEngine(SteppedEngineSetup(blocks=40, max_model_tokens=512))


def offers(gap: float, prompt: int, output: int):
    at = 0.0
    while True:
        at += gap
        yield Offer(at, prompt, output, output)


@pytest.mark.parametrize("tandem", [None, {"ordering": "srmt"}])
def test_all_memory_is_useful_if_requests_run_alone(engine, tandem):
    """Each request holds 20 to 25 of 40 blocks and ends before the next arrives."""
    variant = EngineVariant("alone", tandem)
    outcome = play(engine, variant, offers(10.0, 320, 80), ReplayWindow(2, 60), OBJECTIVES, 0.1)
    assert outcome.strict == 1.0
    busy = outcome.met_share / (22.5 / 40)
    assert 0.1 < busy < 0.5
    assert outcome.held_share == pytest.approx(outcome.met_share, rel=0.05)
    assert (outcome.hook_us > 0) is (tandem is not None)


def test_memory_of_requests_that_missed_is_not_useful(engine):
    """Each request needs 32 of 40 blocks and two arrive per second, so that the later one is preempted."""
    outcome = play(
        engine, EngineVariant("stock"), offers(0.5, 320, 190), ReplayWindow(5, 20), OBJECTIVES, 2.0
    )
    assert outcome.strict < 0.2
    assert outcome.held_share > 0.6
    assert outcome.met_share < 0.3


def with_classes(gap: float, prompt: int, output: int):
    for number, offer in enumerate(offers(gap, prompt, output)):
        yield replace(offer, service_class=THREE_CLASSES[number % 3])


def test_the_gate_rejects_what_the_engine_would_keep_waiting(engine):
    """Each request needs 32 of 40 blocks for 6 s and one arrives every 2 s."""
    variant = EngineVariant("srmt", {"ordering": "srmt"})
    window = ReplayWindow(40, 300)
    alone, behind = (
        play(engine, each, with_classes(2.0, 320, 190), window, OBJECTIVES, 0.5)
        for each in (variant, replace(variant, has_gate=True))
    )
    assert (alone.rejected, behind.rejected > 0.3) == (0.0, True)
    assert behind.strict >= alone.strict - 0.05
    assert set(alone.by_class) == {"interactive", "standard", "batch"}


def test_embedding_passes_take_time_from_the_engine(engine):
    variant, window = EngineVariant("stock"), ReplayWindow(2, 30)
    results = [
        play(engine, variant, offers(3.0, 100, 50), window, OBJECTIVES, 1 / 3, load)
        for load in (None, EmbeddingsBeside(device_share=0.3, pass_seconds=0.02, objective=0.3))
    ]
    assert results[0].embeddings is None
    assert results[1].embeddings > 0.9
    assert results[1].steps == pytest.approx(results[0].steps, rel=0.1)
    assert results[1].held_share > 1.2 * results[0].held_share
