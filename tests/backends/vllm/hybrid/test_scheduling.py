"""The choice of forms in vLLM's real scheduler without a model, and in a whole engine with one."""

from queue import Queue

import pytest

from backends.vllm.hybrid.support import HybridSetup
from backends.vllm.plugin.shared_state import SharedState, open_shared_state
from backends.vllm.simulation.stepped_engine import HiddenStates, SteppedEngine, SteppedEngineSetup
from controlplane.core.generation import Sampling
from controlplane.core.pool_view import HiddenStateCost
from controlplane.policy.cache_tiers.selection import TierChoice
from controlplane.policy.engine.options import EngineOptions
from predictors.timing.hidden_state_cost import HiddenStateCostModel
from tests.engines import complete, running_vllm, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

FREE = HiddenStates(0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def stepped():
    return SteppedEngine(SteppedEngineSetup(blocks=40, max_model_tokens=512, hidden=True))


def _run(engine, hidden, *, requests):
    """(finished requests, largest batch, whether any request was on hidden states)."""
    with open_shared_state() as state:
        scheduler = engine.restart(tandem={"ordering": "fcfs", "look_ahead": "none"}, hidden=hidden)
    for number in range(requests):
        engine.add(f"r{number}", 100, 20, extra={"tandem": {"tokens": 20}})
    finished = most = 0
    used_hidden = False
    while scheduler.requests:
        finished += sum(is_finished for *_, is_finished in engine.step())
        most = max(most, len(scheduler.running))
        reading = state.read()
        # The rows are what the gate's leases follow.
        assert sum(blocks for _, blocks in reading.rows) == reading.facts.used
        used_hidden = used_hidden or bool(scheduler.hybrid_cache.hidden)
    assert scheduler.balloon.used == 0
    return finished, most, used_hidden


def test_hidden_states_allow_about_twice_as_many_concurrent_requests(stepped):
    # 120 tokens: 8 blocks of keys and values, 4 of hidden states.
    assert _run(stepped, HiddenStates(1.0, 0.0, 0.0), requests=12) == (12, 5, False)
    finished, most, used_hidden = _run(stepped, FREE, requests=12)
    assert (finished, used_hidden) == (12, True)
    assert most >= 9


def test_requests_stay_on_keys_and_values_if_memory_is_ample(stepped):
    assert _run(stepped, FREE, requests=2) == (2, 2, False)


@pytest.fixture
def shared(tmp_path):
    """Shared state with an embedding pass under way."""
    state = SharedState.create(tmp_path / "state")
    state.is_device_shared = True
    return state


def test_a_request_that_ends_the_delay_gets_its_form(stepped, shared):
    scheduler = stepped.restart(tandem={}, hidden=HiddenStates(0.0, 0.0, 0.0, forms="on"))
    stepped.add("first", 20, 60, extra={"tandem": {"ttft_ms": 60_000, "tpot_ms": 60_000}})
    for _ in range(3):
        stepped.step()
    scheduler._shared_state = shared
    arriving = Queue()
    arriving.put("second")
    scheduler.input_queue = arriving
    scheduler.process_inputs = lambda: stepped.add(arriving.get_nowait(), 20, 60, extra={})
    stepped.step()
    assert scheduler.hybrid_cache.hidden == {"first", "second"}


MEASURED = HiddenStateCost(5e-6, 1e-4, 2e-3)


def _learned(engine, *, state=None, forms=None, restoring=0.0):
    """The learned cost of hidden states after three requests on them."""
    cost = HiddenStates(MEASURED.token, MEASURED.request, MEASURED.step, restoring, forms="on")
    scheduler = engine.restart(tandem={"ordering": "fcfs"}, hidden=cost)
    scheduler._shared_state, scheduler.choose_tiers = state, forms or scheduler.choose_tiers
    for number in range(3):
        engine.add(f"r{number}", 100, 20 + 10 * number, extra={})
    while scheduler.requests:
        engine.step()
    return scheduler.hidden_cost.price


def test_steps_under_contention_do_not_update_the_hidden_state_cost(stepped, shared):
    assert _learned(stepped, state=shared) == HiddenStateCostModel(MEASURED).price
    assert _learned(stepped) != HiddenStateCostModel(MEASURED).price


class _LeaveOnce:
    """Converts one request as soon as all three decode."""

    left = False

    def __call__(self, view, waiting, hidden, *, rows_per_block, price):
        if self.left or len(hidden) < 3:
            return TierChoice(hidden=frozenset(progress.request.id for progress in waiting))
        self.left = True
        return TierChoice(leaving=frozenset({"r1"}))


def test_steps_with_a_conversion_do_not_update_the_hidden_state_cost(stepped):
    forms = _LeaveOnce()
    # 101 tokens to restore: 10 seconds.
    slow = _learned(stepped, forms=forms, restoring=0.1)
    assert forms.left
    assert slow == _learned(stepped, forms=_LeaveOnce(), restoring=0.0)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="function")
async def test_an_engine_process_gives_the_same_outputs_on_hidden_states():
    """Forms reach the worker, the models are registered there, and the cost is measured at the start."""
    sampling = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompt = [7 + i for i in range(90)]
    outputs = []
    for hybrid in (None, HybridSetup("OPTForCausalLM", "on")):
        engine = running_vllm("tandem/tiny-opt", scheduling=EngineOptions(), hybrid=hybrid, dtype="float32")
        async with engine as generator:
            outputs.append(tokens_of(await complete(generator, prompt, sampling)))
    assert len(outputs[0]) == 24
    assert outputs[0] == outputs[1]
