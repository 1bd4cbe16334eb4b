"""The simulated backends implement their ports, each alone and both on one device."""

import asyncio
from functools import partial

import pytest

from backends.cost_models.step_time import affine, embedding_line, llm_only, sequential
from backends.simulated.embedder import SimulatedEmbedder
from backends.simulated.generator import SimulatedGenerator
from backends.simulated.shared_device import SimulatedDevice
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.clock import Instant, seconds
from controlplane.core.errors import BackendDown, Refused
from controlplane.core.generation import Sampling
from controlplane.core.request import Kind
from tests.backends.simulated.engine_scenario import GEOMETRY, run_engines
from tests.example_requests import a_request

request = partial(a_request, prompt_tokens=8, max_output_tokens=100)


def pair(length: int = 5, *, batch_time=None, kv_bytes: int | None = None, max_model_tokens: int = 64):
    device = SimulatedDevice(batch_time or sequential(llm_only(affine(1.0, 0, 0, 0)), embedding_line(0.5, 0)))
    generator = SimulatedGenerator(
        device,
        geometry=GEOMETRY,
        lengths=lambda _: length,
        kv_bytes=kv_bytes,
        max_model_tokens=max_model_tokens,
    )
    return generator, SimulatedEmbedder(device, max_input_tokens=8, batch_tokens=16)


def run_scenario(scenario, **options):
    return run_engines(scenario, *pair(**options))


async def collect(generator, request, prompt=range(8), **sampling):
    now = asyncio.get_running_loop().time
    deltas = generator.generate(request, prompt, Sampling(**{"max_tokens": 20, **sampling}))
    return [(now(), delta) async for delta in deltas]


def test_each_step_yields_a_token_and_the_last_a_finish_reason():
    async def scenario(generator, _):
        natural = await collect(generator, request())
        capped = await collect(generator, request(), max_tokens=3)
        return natural, capped

    natural, capped = run_scenario(scenario)
    assert [at for at, _ in natural] == [1, 2, 3, 4, 5]
    assert [delta.finish_reason for _, delta in natural] == [None] * 4 + ["stop"]
    assert [delta.finish_reason for _, delta in capped] == [None, None, "length"]


def test_a_taker_gets_all_deltas_but_the_last_at_the_same_times_and_in_the_same_order():
    async def scenario(generator, takes):
        seen, now = [], asyncio.get_running_loop().time

        async def read(name, samples):
            if takes:
                generator.takers[name] = lambda delta: seen.append((now(), name, delta))
            async for delta in generator.generate(request(name), range(8), Sampling(max_tokens=9, n=samples)):
                seen.append((now(), name, delta))
                read_by_stream[name] = read_by_stream.get(name, 0) + 1

        read_by_stream = {}
        await asyncio.gather(read("a", 1), read("b", 2), read("c", 1))
        return seen, read_by_stream

    # Too few blocks, so that requests are preempted and resume in the engine.
    found = [
        run_scenario(
            lambda one, _, takes=takes: scenario(one, takes), length=9, kv_bytes=32, max_model_tokens=20
        )
        for takes in (False, True)
    ]
    (streamed, all_read), (taken, last_read) = found
    assert streamed == taken
    assert all_read == {"a": 9, "b": 18, "c": 9}
    assert (last_read["a"], last_read["c"]) == (1, 1)
    assert 2 <= last_read["b"] < 18


def test_an_error_of_a_taker_ends_the_stream():
    async def scenario(generator, _):
        def fail(delta):
            raise ZeroDivisionError("no such figure")

        generator.takers["r"] = fail
        with pytest.raises(BackendDown, match="no such figure"):
            await collect(generator, request())
        return generator.state()

    assert run_scenario(scenario).used_bytes == 0


def test_samples_of_a_request_are_interleaved():
    async def scenario(generator, _):
        return await collect(generator, request(), n=2)

    deltas = run_scenario(scenario)
    assert [(at, delta.index) for at, delta in deltas] == [(t, i) for t in range(1, 6) for i in (0, 1)]


def test_decoding_and_embedding_share_a_step():
    async def scenario(generator, embedder):
        now = asyncio.get_running_loop().time
        passes, left = [], []

        def on_pass(finished):
            passes.append(finished)
            left.append(embedder.tokens_left(request().id))

        embedder.on_pass = on_pass
        answer = asyncio.create_task(collect(generator, request()))
        await asyncio.sleep(0.1)
        vectors = await embedder.embed(request(kind=Kind.EMBED), [range(8)] * 3, deadline=None)
        embedded_at = now()
        assert left == [8, 0] and embedder.tokens_left(request().id) is None
        return await answer, embedded_at, vectors, passes

    answer, embedded_at, vectors, passes = run_scenario(scenario)
    # Three inputs of 8 take two batches of 16 tokens: the second and third step last 0.5 s longer.
    assert [at for at, _ in answer] == [1, 2.5, 4, 5, 6]
    assert embedded_at == 4
    assert vectors.shape == (3, 8)
    assert [(p.inputs, p.tokens, p.padded_tokens) for p in passes] == [(2, 16, 16), (1, 8, 8)]


def test_embeddings_follow_deadlines_then_late_calls_then_calls_without_deadline():
    async def scenario(_, embedder):
        ended = []

        async def embed(name, deadline):
            await embedder.embed(request(name, kind=Kind.EMBED), [range(8)] * 2, deadline=deadline)
            ended.append(name)

        by = {"lost": Instant(-1), "none": None, "late": Instant(seconds(9)), "soon": Instant(seconds(3))}
        tasks = [embed(name, deadline) for name, deadline in by.items()]
        await asyncio.gather(*tasks)
        return ended

    assert run_scenario(scenario) == ["soon", "late", "lost", "none"]


def test_a_cancelled_call_is_in_no_further_batch():
    async def scenario(_, embedder):
        passes = []
        embedder.on_pass = passes.append
        call = asyncio.create_task(embedder.embed(request(kind=Kind.EMBED), [range(8)] * 10, deadline=None))
        await asyncio.sleep(0.7)
        call.cancel()
        await asyncio.wait([call])
        await embedder.embed(request(kind=Kind.EMBED), [range(4)], deadline=None)
        return passes

    assert [p.inputs for p in run_scenario(scenario)] == [2, 2, 1]


def test_preempt_frees_blocks_and_ends_the_stream():
    async def scenario(generator, _):
        answer = asyncio.create_task(collect(generator, request("victim")))
        await asyncio.sleep(2.5)
        held = generator.state().used_bytes
        await generator.preempt("victim")
        return held, generator.state(), await answer

    held, state, answer = run_scenario(scenario)
    assert held == GEOMETRY.bytes(10)
    assert (state.used_bytes, state.running, state.preemptions) == (0, 0, 1)
    assert [delta.finish_reason for _, delta in answer] == [None, None, "preempted"]


def test_a_resumed_request_generates_only_the_rest():
    async def scenario(generator, _):
        return await collect(generator, request(), prompt=range(8 + 3), max_tokens=17)

    assert len(run_scenario(scenario)) == 2


def test_closing_a_stream_removes_it_from_the_engine():
    async def scenario(generator, _):
        deltas = generator.generate(request(), range(8), Sampling(max_tokens=20))
        await anext(deltas)
        await deltas.aclose()
        return generator.state()

    state = run_scenario(scenario)
    assert (state.running, state.waiting, state.used_bytes) == (0, 0, 0)


def test_both_requests_finish_although_blocks_run_out():
    async def scenario(generator, _):
        requests = [collect(generator, request(name), max_tokens=12) for name in ("a", "b")]
        return await asyncio.gather(*requests), generator.state()

    (first, second), state = run_scenario(scenario, length=6, kv_bytes=20, max_model_tokens=20)
    assert [len(first), len(second)] == [6, 6]
    # Both prompts fit, both outputs do not: the newer request is preempted and recomputes its prompt.
    assert first[-1][0] == 6 < second[-1][0]
    assert (state.preemptions, state.used_bytes) == (1, 0)


def test_a_batch_out_of_memory_is_retried_in_halves_on_an_idle_device():
    device = SimulatedDevice(embedding_line(0.5, 0))
    embedder = SimulatedEmbedder(
        device, max_input_tokens=8, batch_tokens=16, bytes_per_token=1, room=lambda: 8
    )

    async def main():
        passes = []
        embedder.on_pass = passes.append
        await embedder.start()
        inputs = [range(8), range(8)]
        found = await embedder.embed(request(kind=Kind.EMBED), inputs, deadline=None)
        await embedder.stop()
        return len(found), [done.inputs for done in passes], asyncio.get_running_loop().time()

    # The first step is lost to the failed batch.
    assert run(main()) == (2, [1, 1], 1.5)
    assert embedder.out_of_memory == 1


def test_impossible_lengths_are_rejected():
    async def scenario(generator, _):
        with pytest.raises(Refused, match="change prompt or max_tokens"):
            await collect(generator, request(), max_tokens=100)
        with pytest.raises(Refused, match="at least 1"):
            await collect(generator, request(), max_tokens=0)

    run_scenario(scenario)


def test_a_pool_too_small_for_one_sequence_is_rejected():
    with pytest.raises(ValueError, match="would never finish"):
        pair(kv_bytes=8)


def test_a_failed_device_fails_running_and_new_requests():
    async def scenario(generator, embedder):
        call = asyncio.create_task(embedder.embed(request(kind=Kind.EMBED), [range(8)], deadline=None))
        with pytest.raises(BackendDown, match="a duration must be at least 0"):
            await collect(generator, request())
        with pytest.raises(BackendDown, match="a duration must be at least 0"):
            await call
        with pytest.raises(BackendDown):
            await generator.check()

    with pytest.raises(ValueError, match="a duration must be at least 0"):
        run_scenario(scenario, batch_time=lambda _: -1.0)


def test_stop_fails_running_requests():
    async def main():
        generator, _ = pair()
        await generator.start()
        answer = asyncio.create_task(collect(generator, request()))
        await asyncio.sleep(1.5)
        await generator.stop()
        with pytest.raises(BackendDown, match="stopped"):
            await answer

    run(main())


def test_cost_of_a_pass_is_asked_for_only_when_calls_wait():
    asked = []

    async def scenario(generator, embedder):
        embedder.pause_cost = lambda: asked.append(asyncio.get_running_loop().time())
        await collect(generator, request())
        assert asked == []
        await embedder.embed(request("e", kind=Kind.EMBED), [range(4)], deadline=None)
        assert len(asked) == 1

    run_scenario(scenario)
