"""Simulated engines that compute at the same time: contention, decode pacing, and late delivery of tokens."""

import asyncio
from functools import partial

import pytest

from backends.cost_models.step_time import StepLoad, affine, embedding_line, llm_only
from backends.simulated.embedder import SimulatedEmbedder
from backends.simulated.generator import SimulatedGenerator
from backends.simulated.shared_device import SimulatedDevice
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.clock import milliseconds
from controlplane.core.engine_reports import DeviceSharing
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import Handoff, Sampling
from controlplane.core.request import Kind
from controlplane.core.slo import Slo
from controlplane.policy.engine.options import EngineOptions
from tests.backends.simulated.engine_scenario import GEOMETRY, run_engines
from tests.example_requests import a_request

# Seconds of a step, and of the one pass in each of the scenarios.
STEP, PASS = 1.0, 0.5
request = partial(a_request, prompt_tokens=8, max_output_tokens=40)


def run_scenario(
    scenario,
    *,
    step=STEP,
    pass_seconds=PASS,
    slowdown=1.0,
    delivery=(0.0, 0.0),
    sharing=DeviceSharing.BESIDE,
    **options,
):
    """Runs `scenario(generator, embedder)` with a device each."""
    device = SimulatedDevice(llm_only(affine(step, 0, 0, 0)))
    pass_device = SimulatedDevice(embedding_line(pass_seconds, 0))
    pass_device.slow_down(device, slowdown)
    generator = SimulatedGenerator(
        device, geometry=GEOMETRY, lengths=lambda _: 6, kv_bytes=64 * GEOMETRY.bytes_per_block,
        max_model_tokens=64, scheduling=EngineOptions(**options), delivery=delivery,
    )  # fmt: skip
    embedder = SimulatedEmbedder(pass_device, max_input_tokens=8, batch_tokens=8, sharing=sharing)
    embedder.on_computing = lambda is_computing: generator.set_device_contention(is_shared=is_computing)
    return run_engines(scenario, generator, embedder)


async def token_times(generator, request):
    now = asyncio.get_running_loop().time
    handoff = Handoff(forecast=LengthForecast((0.0, 1.0), (6.0, 6.0)))
    deltas = generator.generate(request, range(8), Sampling(max_tokens=40), handoff=handoff)
    return [round(now(), 6) async for delta in deltas if delta.token_ids]


async def embed(embedder, at):
    """The time at which an embedding that begins at `at` ends."""
    now = asyncio.get_running_loop().time
    await asyncio.sleep(at - now())
    await embedder.embed(request("e", kind=Kind.EMBED), [range(8)], deadline=None)
    return round(now(), 6)


def answered_beside_a_pass(slo=None, at=1.25, **options):
    """The times of the tokens of an answer, and of the end of an embedding beside it."""

    async def scenario(generator, embedder):
        embedding = asyncio.create_task(embed(embedder, at))
        return await token_times(generator, request("r", slo=slo or Slo())), await embedding

    return run_scenario(scenario, **options)


def test_a_pass_and_a_step_run_at_the_same_time():
    assert answered_beside_a_pass() == ([1, 2, 3, 4, 5, 6], 1.75)


def test_a_step_is_slowed_down_while_a_pass_runs():
    # From 1.25 to 1.75 a quarter of a second of the second step is computed.
    tokens, end = answered_beside_a_pass(slowdown=2.0)
    assert (tokens, end) == ([1, 2.25, 3.25, 4.25, 5.25, 6.25], 1.75)
    # A step that begins during the pass, too.
    tokens, _ = answered_beside_a_pass(slowdown=2.0, pass_seconds=1.5)
    assert tokens == [1, 2.75, 3.75, 4.75, 5.75, 6.75]


def test_a_step_waits_for_the_end_of_a_pass_as_far_as_the_pace_allows():
    slo, times = Slo(tpot=milliseconds(50)), {"step": 0.01, "at": 0.025}
    # The fourth step would begin at 0.03.
    tokens, end = answered_beside_a_pass(slo, pass_seconds=0.015, **times)
    assert end == 0.04
    assert tokens == pytest.approx([0.01, 0.02, 0.03, 0.05, 0.06, 0.07])
    # Less than 0.8 of the objective after the start of the third one, a longer pass is no longer waited for.
    tokens, end = answered_beside_a_pass(slo, pass_seconds=1.0, **times)
    assert end == pytest.approx(1.025)
    assert 0.04 < tokens[3] < 0.02 + 0.8 * 0.05 + 0.01 + 1e-6
    unpaced, _ = answered_beside_a_pass(slo, pass_seconds=1.0, decode_pacing=0, **times)
    assert unpaced == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05, 0.06])


def test_a_request_that_arrives_ends_the_delay_and_the_delay_is_reported():
    steps = []

    async def scenario(generator, embedder):
        generator.on_step = steps.append
        embedding = asyncio.create_task(embed(embedder, 0.025))
        first = asyncio.create_task(token_times(generator, request("a", slo=Slo(tpot=milliseconds(50)))))
        await asyncio.sleep(0.035)
        second = await token_times(generator, request("b"))
        embedding.cancel()
        return await first, second

    first, second = run_scenario(scenario, step=0.01, pass_seconds=1.0)
    assert first[:4] == pytest.approx([0.01, 0.02, 0.03, 0.045])
    assert second[0] == pytest.approx(0.045)
    delayed = [(step.took, step.waited) for step in steps if step.waited]
    assert delayed[0] == (pytest.approx(milliseconds(15)), pytest.approx(milliseconds(5)))


@pytest.mark.parametrize(("sharing", "end"), [(DeviceSharing.BESIDE, 10.0), (DeviceSharing.IDLE, 1.75)])
def test_in_the_idle_class_a_pass_has_no_cost(sharing, end):
    async def scenario(generator, embedder):
        # So costly that the pass waits until it takes 5 % of the time.
        embedder.pause_cost = lambda: lambda pauses: [100.0] * len(pauses)
        return await embed(embedder, 1.25)

    assert run_scenario(scenario, sharing=sharing, pass_seconds=PASS) == pytest.approx(end, abs=0.01)


@pytest.mark.parametrize(
    ("sharing", "ends"), [(DeviceSharing.IDLE, [0.2, 0.8]), (DeviceSharing.TURNS, [1.1, 1.1])]
)
def test_beside_the_llm_inputs_of_other_lengths_are_for_another_pass(sharing, ends):
    async def scenario():
        device = SimulatedDevice(embedding_line(0.1, 0.1))
        embedder = SimulatedEmbedder(device, max_input_tokens=8, batch_tokens=64, sharing=sharing)
        await embedder.start()
        now, found = asyncio.get_running_loop().time, []

        async def embedded(name, lengths):
            inputs = [range(length) for length in lengths]
            await embedder.embed(request(name, kind=Kind.EMBED), inputs, deadline=None)
            found.append(round(now(), 6))

        # A pass costs as much to start as one token of padding.
        await asyncio.gather(embedded("short", [1]), embedded("long", [5]))
        await embedder.stop()
        return found

    assert run(scenario()) == pytest.approx(ends)


def test_tokens_are_delivered_in_order_some_time_after_their_step():
    async def scenario(generator, _):
        names = "abc"
        return await asyncio.gather(*(token_times(generator, request(name)) for name in names))

    for found in run_scenario(scenario, delivery=(0.1, 0.2)):
        assert found == pytest.approx([1.7, 2.7, 3.7, 4.7, 5.7, 6.7])
    # Longer than a step.
    for found in run_scenario(scenario, delivery=(2.5, 0.0)):
        assert found == pytest.approx([3.5, 4.5, 5.5, 6.5, 7.5, 8.5])


def test_the_times_of_steps_are_spread_around_the_expected_one():
    async def scenario():
        steps = []
        device = SimulatedDevice(
            llm_only(affine(1.0, 0, 0, 0)),
            on_step=lambda start, took, load: steps.append(took),
            spread=(0.5, 1.5),
        )
        generator = SimulatedGenerator(device, geometry=GEOMETRY, lengths=lambda _: 6, kv_bytes=None)
        await generator.start()
        for number in range(20):
            await token_times(generator, request(f"r{number}"))
        await generator.stop()
        assert device.duration(StepLoad(decodes=1)) == 1.0
        return steps

    steps = run(scenario())
    assert set(steps) == {0.5, 1.5}
    assert sum(steps) / len(steps) == pytest.approx(1.0, abs=0.1)
