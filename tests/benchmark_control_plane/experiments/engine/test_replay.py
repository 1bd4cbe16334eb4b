"""What a run of the stepped engine says of the memory, where it can be worked out by hand."""

import pytest

from benchmark_control_plane.experiments.engine.replay import EngineVariant, ReplayWindow, play
from benchmark_control_plane.experiments.engine.workload import Offer, TokenObjectives

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

PROMISE = TokenObjectives(ttft=1.0, gap=1.0)


@pytest.fixture(scope="module")
def engine():
    from backends.vllm.simulation.stepped_engine import Setup, SteppedEngine

    return SteppedEngine(Setup(blocks=40, max_model_tokens=512))


def offers(gap: float, prompt: int, output: int):
    at = 0.0
    while True:
        at += gap
        yield Offer(at, prompt, output, output)


@pytest.mark.parametrize("tandem", [None, {"ordering": "srmt"}])
def test_where_everybody_is_served_alone_all_that_is_held_is_for_promises_kept(engine, tandem):
    """20 to 25 of 40 blocks, and nobody between the end of one and the arrival of the next."""
    contender = EngineVariant("alone", tandem)
    outcome = play(engine, contender, offers(10.0, 320, 80), ReplayWindow(2, 60), PROMISE, 0.1)
    assert outcome.strict == 1.0
    busy = outcome.kept_share / (22.5 / 40)
    assert 0.1 < busy < 0.5
    assert outcome.held_share == pytest.approx(outcome.kept_share, rel=0.05)


def test_what_answers_held_that_broke_their_promise_was_for_nobody(engine):
    """Each would hold 32 of 40 blocks, and two come each second: who starts beside another gives way."""
    outcome = play(engine, EngineVariant("stock"), offers(0.5, 320, 190), ReplayWindow(5, 20), PROMISE, 2.0)
    assert outcome.strict < 0.2
    assert outcome.held_share > 0.6
    assert outcome.kept_share < 0.3
