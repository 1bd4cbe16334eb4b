"""The greedy inside vLLM's real scheduler, without a model; and the whole engine with one."""

from queue import Queue

import pytest

from backends.vllm.hybrid.support import HybridSetup
from backends.vllm.plugin.shared_state import SharedState, open_shared_state
from backends.vllm.simulation.stepped_engine import HiddenStates, Setup, SteppedEngine
from controlplane.core.generation import Sampling
from controlplane.core.view import HiddenStateCost
from controlplane.policy.cache_tiers.selection import TierChoice
from controlplane.policy.engine.options import EngineOptions
from predictors.timing.hidden_state_cost import HiddenStateCostModel
from tests.engines import complete, running_vllm, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

FREE = HiddenStates(0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def stepped():
    return SteppedEngine(Setup(blocks=40, max_model_tokens=512, hidden=True))


def _run(engine, hidden, *, requests):
    """(answers finished, most requests at a time, whether anybody kept hidden states)."""
    with open_shared_state() as board:
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


@pytest.fixture
def shared(tmp_path):
    """Embeddings want the device."""
    board = SharedState.create(tmp_path / "board")
    board.is_device_shared = True
    return board


def test_a_newcomer_that_ended_a_wait_keeps_hidden_states_too(stepped, shared):
    scheduler = stepped.restart(tandem={}, hidden=HiddenStates(0.0, 0.0, 0.0, forms="on"))
    stepped.add("first", 20, 60, extra={"tandem": {"ttft_ms": 60_000, "tpot_ms": 60_000}})
    for _ in range(3):
        stepped.step()
    scheduler._shared_state = shared
    arriving = Queue()
    arriving.put("newcomer")
    scheduler.input_queue = arriving
    scheduler.process_inputs = lambda: stepped.add(arriving.get_nowait(), 20, 60, extra={})
    stepped.step()
    assert scheduler.hybrid_cache.hidden == {"first", "newcomer"}


MEASURED = HiddenStateCost(5e-6, 1e-4, 2e-3)


def _learned(engine, *, board=None, forms=None, restoring=0.0):
    """What hidden states are thought to cost after three answers on them."""
    told = HiddenStates(MEASURED.token, MEASURED.request, MEASURED.step, restoring, forms="on")
    scheduler = engine.restart(tandem={"ordering": "fcfs"}, hidden=told)
    scheduler._shared_state, scheduler.forms = board, forms or scheduler.forms
    for number in range(3):
        engine.add(f"r{number}", 100, 20 + 10 * number, extra={})
    while scheduler.requests:
        engine.step()
    return scheduler.hidden_cost.price


def test_steps_beside_embeddings_teach_nothing_of_hidden_states(stepped, shared):
    assert _learned(stepped, board=shared) == HiddenStateCostModel(MEASURED).price
    assert _learned(stepped) != HiddenStateCostModel(MEASURED).price


class _LeaveOnce:
    """One leaves as soon as all three decode."""

    left = False

    def choose(self, view, waiting, hidden, price):
        if self.left or len(hidden) < 3:
            return TierChoice(hidden=frozenset(progress.request.id for progress in waiting))
        self.left = True
        return TierChoice(leaving=frozenset({"r1"}))


def test_a_step_that_rewrites_a_request_teaches_nothing_of_those_that_decode(stepped):
    forms = _LeaveOnce()
    # 101 tokens to restore: 10 seconds.
    slow = _learned(stepped, forms=forms, restoring=0.1)
    assert forms.left
    assert slow == _learned(stepped, forms=_LeaveOnce(), restoring=0.0)


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
