"""The executor without a model, in a live engine and in virtual time."""

import asyncio
import os
import signal

import pytest
import pytest_asyncio

from controlplane.core.errors import BackendDown
from controlplane.core.generation import Sampling
from tests.engines import complete, running_vllm, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

PROMPT = list(range(20, 60))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live():
    async with running_vllm(
        stall_seconds=4,
        distributed_executor_backend="backends.vllm.simulation.executor.SimExecutor",
        load_format="dummy",
        scheduler_cls="backends.vllm.scheduler.make",
        additional_config={"tandem_sim": {"batch_time": "instant", "clock": "real"}},
    ) as generator:
        yield generator


@pytest.mark.asyncio(loop_scope="module")
async def test_a_live_engine_without_a_model_generates_repeatable_tokens(live):
    sampling = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
    first, second = [tokens_of(await complete(live, PROMPT, sampling)) for _ in range(2)]
    assert len(first) == 40
    assert first == second
    assert live.stall_count == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_hangs_is_killed_and_its_requests_end(live):
    """Must run last: the engine is not restarted."""
    [engine] = live._engine_children()
    os.kill(engine.pid, signal.SIGSTOP)
    asking = [complete(live, PROMPT, Sampling(max_tokens=40, ignore_eos=True)) for _ in range(3)]
    async with asyncio.timeout(120):
        ended = await asyncio.gather(*asking, return_exceptions=True)
        why = "took no step for too long and was killed"
        assert [isinstance(end, BackendDown) and why in str(end) for end in ended] == [True] * 3
        await asyncio.to_thread(engine.join)
        with pytest.raises(BackendDown, match=why):
            await live.check()
        with pytest.raises(BackendDown, match=why):
            await complete(live, PROMPT, Sampling(max_tokens=1))
    with pytest.raises(BackendDown, match=why):
        live.state()
    assert live.stall_count == 1


def test_virtual_time_advances_by_the_latency_model():
    from backends.cost_models.step_time import OPT_13B_A100_80G, StepLoad
    from backends.vllm.simulation.stepped_engine import SteppedEngine, SteppedEngineSetup

    engine = SteppedEngine(SteppedEngineSetup(batch_time="opt-13b-a100-80g"))
    engine.restart()
    engine.add("only", 100, 3, extra={})
    seen = []
    while not seen or not seen[-1][2]:
        (one,) = engine.step()
        seen.append((engine.now_ns, one[1], one[2]))
    prefill = OPT_13B_A100_80G(StepLoad(prefill_tokens=100, squares=100 * 100))
    decodes = [OPT_13B_A100_80G(StepLoad(decodes=1, cells=cells)) for cells in (101, 102)]
    expected = [prefill, prefill + decodes[0], prefill + sum(decodes)]
    assert [at / 1e9 for at, _, _ in seen] == pytest.approx(expected, abs=1e-8)
    assert [tokens for _, tokens, _ in seen] == [1, 1, 1]


def test_an_unknown_latency_model_stops_the_start():
    from backends.vllm.simulation.stepped_engine import SteppedEngine, SteppedEngineSetup

    with pytest.raises(ValueError, match=r"tandem_sim.batch_time='h900'.*choose one of instant"):
        SteppedEngine(SteppedEngineSetup(batch_time="h900"))
