"""The greedy inside vLLM's real scheduler, without a model; and the whole engine with one."""

import pytest

from backends.vllm.board import named_board
from backends.vllm.hybrid.support import HybridSetup
from backends.vllm.stepped import HiddenStates, Setup, SteppedEngine
from controlplane.core.ports import Sampling
from controlplane.policy.engine_options import EngineOptions
from tests.engines import complete, running_vllm, tokens_of

pytestmark = pytest.mark.engine

FREE = HiddenStates(0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def stepped():
    return SteppedEngine(Setup(blocks=40, max_model_tokens=512, hidden=True))


def _run(engine, hidden, *, requests):
    """(answers finished, most requests at a time, whether anybody kept hidden states)."""
    with named_board() as board:
        scheduler = engine.restart(tandem={"ordering": "fcfs", "look_ahead": "nobody"}, hidden=hidden)
    for number in range(requests):
        engine.add(f"r{number}", 100, 20, extra={"tandem": {"tokens": 20}})
    finished = most = 0
    used_hidden = False
    while scheduler.requests:
        finished += sum(is_finished for *_, is_finished in engine.step())
        most = max(most, len(scheduler.running))
        reading = board.read()
        # The gate's leases follow the rows.
        assert sum(blocks for *_, blocks in reading.rows) == reading.facts.used
        used_hidden = used_hidden or bool(scheduler.hybrid_cache.hidden)
    assert scheduler.balloon.used == 0
    return finished, most, used_hidden


def test_short_memory_serves_twice_as_many_at_a_time(stepped):
    # 120 tokens: 8 blocks of keys and values, 4 of hidden states.
    assert _run(stepped, HiddenStates(1.0, 0.0, 0.0), requests=12) == (12, 5, False)
    finished, most, used_hidden = _run(stepped, FREE, requests=12)
    assert (finished, used_hidden) == (12, True)
    assert most >= 9


def test_ample_memory_keeps_everybody_on_keys_and_values(stepped):
    assert _run(stepped, FREE, requests=2) == (2, 2, False)


@pytest.mark.asyncio(loop_scope="function")
async def test_an_engine_of_its_own_process_answers_the_same():
    """The forms reach the worker, the models are known there, and the cost is measured at the start."""
    sampling = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompt = [7 + i for i in range(90)]
    answers = []
    for hybrid in (None, HybridSetup("OPTForCausalLM", "on")):
        engine = running_vllm("tandem/tiny-opt", scheduling=EngineOptions(), hybrid=hybrid, dtype="float32")
        async with engine as generator:
            answers.append(tokens_of(await complete(generator, prompt, sampling)))
    assert len(answers[0]) == 24
    assert answers[0] == answers[1]
