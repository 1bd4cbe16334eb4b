"""The simulated engine under an engine policy: order, quota, commands and forecasts."""

import asyncio
from functools import partial

import pytest

from backends.cost_models.step_time import affine, embedding_line, llm_only, sequential
from backends.simulated.embedder import SimulatedEmbedder
from backends.simulated.generator import SimulatedGenerator
from backends.simulated.shared_device import SimulatedDevice
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.clock import milliseconds, seconds
from controlplane.core.engine_reports import EngineStep
from controlplane.core.errors import BackendDown, Refused
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import Handoff, Sampling
from controlplane.core.request import Kind
from controlplane.policy.engine.options import EngineOptions
from tests.backends.simulated.engine_scenario import GEOMETRY, run_engines
from tests.example_requests import a_request

BLOCK = GEOMETRY.bytes_per_block

request = partial(a_request, prompt_tokens=8, max_output_tokens=40)


def point(tokens: float) -> LengthForecast:
    return LengthForecast((0.0, 1.0), (tokens, tokens))


def run_scenario(scenario, *, step: float = 1.0, max_running: int = 4, blocks: int = 24, **options):
    """Runs `scenario(generator, embedder)`; a decode step takes `step` s, an embedding a fifth of it."""
    device = SimulatedDevice(sequential(llm_only(affine(step, 0, 0, 0)), embedding_line(0, step / 40)))
    generator = SimulatedGenerator(
        device, geometry=GEOMETRY, lengths=lambda _: 6, kv_bytes=blocks * BLOCK, max_model_tokens=64,
        max_running=max_running, scheduling=EngineOptions(**options),
    )  # fmt: skip
    return run_engines(scenario, generator, SimulatedEmbedder(device, max_input_tokens=8, batch_tokens=8))


async def token_times(generator, request, handoff=None):
    now = asyncio.get_running_loop().time
    deltas = generator.generate(
        request,
        range(8),
        Sampling(max_tokens=40),
        handoff=Handoff(forecast=point(6)) if handoff is None else handoff,
    )
    return [round(now(), 6) async for delta in deltas if delta.token_ids]


def test_the_policy_orders_requests_that_wait_in_the_engine():
    async def scenario(generator, _):
        first = asyncio.create_task(token_times(generator, request("first")))
        await asyncio.sleep(0.5)
        low = asyncio.create_task(token_times(generator, request("low")))
        high = asyncio.create_task(token_times(generator, request("high", priority=9)))
        await asyncio.sleep(1)
        waiting = generator.state().waiting
        return waiting, [(await task)[0] for task in (first, low, high)]

    assert run_scenario(scenario, max_running=1) == (2, [1, 13, 7])


def test_the_state_is_that_of_the_latest_step():
    async def scenario(generator, _):
        asked = asyncio.create_task(token_times(generator, request("r")))
        await asyncio.sleep(1.5)
        state = generator.state()
        assert generator.state() is state
        await asyncio.sleep(1)
        assert generator.state() is not state
        await asked
        return state, generator.state()

    state, idle = run_scenario(scenario)
    # Eight prompt tokens and the first one generated, which the second step computes.
    assert state.held_bytes == {"r": 3 * BLOCK} and state.used_bytes == 3 * BLOCK
    assert (state.running, state.quota_bytes, state.ceded_bytes) == (1, 24 * BLOCK, 0)
    assert (idle.held_bytes, idle.used_bytes, idle.running) == ({}, 0, 0)


def test_a_quota_is_confirmed_between_two_steps_and_preempts_beyond_it():
    async def scenario(generator, _):
        now = asyncio.get_running_loop().time
        asked = [asyncio.create_task(token_times(generator, request(name))) for name in "abc"]
        await asyncio.sleep(1.5)
        await generator.set_quota(6 * BLOCK)
        at, state = now(), generator.state()
        await asyncio.gather(*asked)
        await generator.set_quota(24 * BLOCK)
        return at, state, generator.state(), [len(task.result()) for task in asked]

    at, state, after, tokens = run_scenario(scenario)
    assert at == 2
    assert (state.used_bytes, state.running, state.preemptions) == (6 * BLOCK, 2, 1)
    # For the next tokens of those that run. A prompt of 8 tokens and two steps' tokens were computed.
    (lost,) = state.preempted
    assert (lost.at, lost.request_id, lost.beneficiary) == (seconds(2), "c", None)
    assert lost.tokens == state.recompute_tokens > 8
    # The step in flight may still write to the blocks of the preempted request.
    assert (state.ceded_bytes, after.ceded_bytes) == (15 * BLOCK, 0)
    assert tokens == [6, 6, 6]


@pytest.mark.long
def test_a_request_larger_than_the_quota_starts_once_the_quota_allows_it():
    async def scenario(generator, _):
        await generator.set_quota(BLOCK)
        asked = asyncio.create_task(token_times(generator, request("r")))
        await asyncio.sleep(5)
        assert (generator.state().running, generator.state().waiting) == (0, 1)
        await generator.set_quota(24 * BLOCK)
        return await asked

    assert run_scenario(scenario)[0] == pytest.approx(6, abs=0.01)


def test_options_and_forecasts_change_the_order():
    async def scenario(generator, _):
        first = asyncio.create_task(token_times(generator, request("first")))
        await asyncio.sleep(0.5)
        guesses = {"long": 30, "short": 20}
        tasks = [
            asyncio.create_task(token_times(generator, request(name), Handoff(forecast=point(tokens))))
            for name, tokens in guesses.items()
        ]
        await asyncio.sleep(1)
        await generator.set_options({"ordering": "mc-sf"})
        generator.set_forecast("long", point(2))
        await first
        return [(await task)[0] for task in tasks]

    assert run_scenario(scenario, max_running=1, ordering="fcfs") == [7, 13]


def test_what_an_engine_cannot_do_is_refused():
    async def scenario(generator, _):
        for quota in (BLOCK - 1, 25 * BLOCK):
            with pytest.raises(Refused, match="choose one block to"):
                await generator.set_quota(quota)
        with pytest.raises(Refused, match="ordering"):
            await generator.set_options({"ordering": "magic"})

    run_scenario(scenario)
    device = SimulatedDevice(llm_only(affine(1.0, 0, 0, 0)))
    stock = SimulatedGenerator(device, geometry=GEOMETRY, lengths=lambda _: 6, kv_bytes=None)

    async def ask_stock():
        await stock.start()
        for command in (stock.set_quota(BLOCK), stock.set_options({})):
            with pytest.raises(Refused, match="takes no quota and no options"):
                await command
        await stock.stop()
        with pytest.raises(BackendDown):
            await stock.set_quota(BLOCK)

    run(ask_stock())
    assert not stock.has_tandem_scheduler


def test_a_command_ends_when_the_device_stops():
    async def scenario(generator, embedder):
        asked = asyncio.create_task(token_times(generator, request("r")))
        await asyncio.sleep(0.5)
        command = asyncio.create_task(generator.set_quota(8 * BLOCK))
        await asyncio.sleep(0)
        await generator.stop()
        await embedder.stop()
        for ended in (command, asked):
            with pytest.raises(BackendDown, match="stopped"):
                await ended
        await generator.start()
        await embedder.start()

    run_scenario(scenario)


@pytest.mark.parametrize(("inputs", "last"), [(1, 10), (200, 12)])
def test_embedding_batches_extend_steps_but_not_the_learned_step_time(inputs, last):
    async def scenario(generator, embedder):
        steps: list[EngineStep] = []
        generator.on_step = steps.append
        embedding = asyncio.create_task(
            embedder.embed(request("e", kind=Kind.EMBED), [range(8)] * inputs, deadline=None)
        )
        for number in range(5):
            await token_times(generator, request(f"r{number}"))
        embedding.cancel()
        return steps, generator._policy.pace_estimator.own_step

    steps, own_step = run_scenario(scenario, step=0.01)
    assert steps[-1].took == pytest.approx(milliseconds(last))
    assert own_step == pytest.approx(milliseconds(10), rel=0.03)


def test_a_dead_engine_ends_its_requests_and_starts_again_as_new():
    """Embeddings on the same device are computed meanwhile."""

    async def scenario(generator, embedder):
        deaths = []
        generator.on_down = deaths.append
        await generator.set_quota(8 * BLOCK)
        await generator.set_options({"urgency": 0.75})
        answers = [asyncio.create_task(token_times(generator, request(name))) for name in "ab"]
        await asyncio.sleep(2.5)
        generator.die("it was killed")
        assert deaths == ["it was killed"]
        for ended in await asyncio.gather(*answers, return_exceptions=True):
            assert isinstance(ended, BackendDown) and "it was killed" in str(ended)
        for call in (generator.check(), token_times(generator, request("c")), generator.set_quota(BLOCK)):
            with pytest.raises(BackendDown, match="it was killed"):
                await call
        with pytest.raises(BackendDown):
            generator.state()
        assert await generator.tokenize("ab")
        vectors = await embedder.embed(request("e", kind=Kind.EMBED), [[1, 2]], deadline=None)
        assert len(vectors) == 1
        await generator.stop()
        await generator.start()
        assert generator.state().quota_bytes == generator.kv_bytes
        assert generator.state().held_bytes == {}
        assert len(await token_times(generator, request("d"))) == 6
        assert deaths == ["it was killed"], "a stop is no death"

    run_scenario(scenario)
