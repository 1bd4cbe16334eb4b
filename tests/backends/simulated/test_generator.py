"""The simulated backends keep the ports' promises, alone and on one device."""

import asyncio

import pytest

from backends.cost_models.step_time import affine, embedding_line, in_turn, llm_only
from backends.simulated.device import SimulatedDevice
from backends.simulated.embedder import SimulatedEmbedder
from backends.simulated.generator import SimulatedGenerator
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.clock import Instant, seconds
from controlplane.core.errors import BackendDown, Refused
from controlplane.core.generation import Sampling
from controlplane.core.geometry import KvGeometry
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo

GEOMETRY = KvGeometry(elements_per_token=1, bytes_per_element=1, block_tokens=4)
CLASS = ServiceClass("any", Slo(), 0, sheddable=False)


def request(name: str = "r", *, kind: Kind = Kind.GENERATE, prompt: int = 8) -> Request:
    return Request(name, kind, "m", "t", CLASS, Slo(), Instant(0), prompt, 100)


def pair(length: int = 5, *, batch_time=None, kv_bytes: int | None = None, max_model_tokens: int = 64):
    device = SimulatedDevice(batch_time or in_turn(llm_only(affine(1.0, 0, 0, 0)), embedding_line(0.5, 0)))
    generator = SimulatedGenerator(
        device,
        geometry=GEOMETRY,
        lengths=lambda _: length,
        kv_bytes=kv_bytes,
        max_model_tokens=max_model_tokens,
    )
    return generator, SimulatedEmbedder(device, max_input_tokens=8, batch_tokens=16)


def played(scenario, **options):
    async def main():
        generator, embedder = pair(**options)
        await generator.start()
        await embedder.start()
        try:
            return await asyncio.wait_for(scenario(generator, embedder), 10_000)
        finally:
            await generator.stop()
            await embedder.stop()

    return run(main())


async def collect(generator, one, prompt=range(8), **sampling):
    now = asyncio.get_running_loop().time
    deltas = generator.generate(one, prompt, Sampling(**{"max_tokens": 20, **sampling}))
    return [(now(), delta) async for delta in deltas]


def test_a_token_a_step_and_a_reason_at_the_end():
    async def scenario(generator, _):
        natural = await collect(generator, request())
        capped = await collect(generator, request(), max_tokens=3)
        return natural, capped

    natural, capped = played(scenario)
    assert [at for at, _ in natural] == [1, 2, 3, 4, 5]
    assert [delta.finish_reason for _, delta in natural] == [None] * 4 + ["stop"]
    assert [delta.finish_reason for _, delta in capped] == [None, None, "length"]


def test_samples_come_side_by_side():
    async def scenario(generator, _):
        return await collect(generator, request(), n=2)

    deltas = played(scenario)
    assert [(at, delta.index) for at, delta in deltas] == [(t, i) for t in range(1, 6) for i in (0, 1)]


def test_both_kinds_share_a_step():
    async def scenario(generator, embedder):
        now = asyncio.get_running_loop().time
        passes, left = [], []

        def on_pass(one):
            passes.append(one)
            left.append(embedder.tokens_left(request().id))

        embedder.on_pass = on_pass
        answer = asyncio.create_task(collect(generator, request()))
        await asyncio.sleep(0.1)
        vectors = await embedder.embed(request(kind=Kind.EMBED), [range(8)] * 3, deadline=None)
        embedded_at = now()
        assert left == [8, 0] and embedder.tokens_left(request().id) is None
        return await answer, embedded_at, vectors, passes

    answer, embedded_at, vectors, passes = played(scenario)
    # Three inputs of 8 take two batches of 16 tokens: the second and third step last 0.5 s longer.
    assert [at for at, _ in answer] == [1, 2.5, 4, 5, 6]
    assert embedded_at == 4
    assert vectors.shape == (3, 8)
    assert [(p.inputs, p.tokens, p.padded_tokens) for p in passes] == [(2, 16, 16), (1, 8, 8)]


def test_the_earlier_deadline_is_embedded_first_then_who_is_late_then_who_has_none():
    async def scenario(_, embedder):
        ended = []

        async def one(name, deadline):
            await embedder.embed(request(name, kind=Kind.EMBED), [range(8)] * 2, deadline=deadline)
            ended.append(name)

        by = {"lost": Instant(-1), "none": None, "late": Instant(seconds(9)), "soon": Instant(seconds(3))}
        tasks = [one(name, deadline) for name, deadline in by.items()]
        await asyncio.gather(*tasks)
        return ended

    assert played(scenario) == ["soon", "late", "lost", "none"]


def test_a_cancelled_embedding_takes_no_more_batches():
    async def scenario(_, embedder):
        passes = []
        embedder.on_pass = passes.append
        call = asyncio.create_task(embedder.embed(request(kind=Kind.EMBED), [range(8)] * 10, deadline=None))
        await asyncio.sleep(0.7)
        call.cancel()
        await asyncio.wait([call])
        await embedder.embed(request(kind=Kind.EMBED), [range(4)], deadline=None)
        return passes

    assert [p.inputs for p in played(scenario)] == [2, 2, 1]


def test_preempting_frees_the_blocks_and_ends_the_stream():
    async def scenario(generator, _):
        answer = asyncio.create_task(collect(generator, request("victim")))
        await asyncio.sleep(2.5)
        held = generator.state().used_bytes
        await generator.preempt("victim")
        return held, generator.state(), await answer

    held, state, answer = played(scenario)
    assert held == GEOMETRY.bytes(10)
    assert (state.used_bytes, state.running, state.preemptions) == (0, 0, 1)
    assert [delta.finish_reason for _, delta in answer] == [None, None, "preempted"]


def test_a_resumed_request_ends_where_it_would_have():
    async def scenario(generator, _):
        return await collect(generator, request(prompt=8), prompt=range(8 + 3), max_tokens=17)

    assert len(played(scenario)) == 2


def test_closing_a_stream_takes_it_out_of_the_engine():
    async def scenario(generator, _):
        deltas = generator.generate(request(), range(8), Sampling(max_tokens=20))
        await anext(deltas)
        await deltas.aclose()
        return generator.state()

    state = played(scenario)
    assert (state.running, state.waiting, state.used_bytes) == (0, 0, 0)


def test_memory_runs_out_and_both_still_finish():
    async def scenario(generator, _):
        asked = [collect(generator, request(name), max_tokens=12) for name in ("a", "b")]
        return await asyncio.gather(*asked), generator.state()

    (one, other), state = played(scenario, length=6, kv_bytes=20, max_model_tokens=20)
    assert [len(one), len(other)] == [6, 6]
    # Both prompts fit, both answers do not: the newer waits for the older, then reads its prompt again.
    assert one[-1][0] == 6 < other[-1][0]
    assert (state.preemptions, state.used_bytes) == (1, 0)


def test_a_batch_that_finds_no_memory_is_tried_in_halves_though_nothing_else_keeps_the_device_awake():
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

    # The first step is lost.
    assert run(main()) == (2, [1, 1], 1.5)
    assert embedder.out_of_memory == 1


def test_what_cannot_be_generated_is_refused():
    async def scenario(generator, _):
        with pytest.raises(Refused, match="change prompt or max_tokens"):
            await collect(generator, request(), max_tokens=100)
        with pytest.raises(Refused, match="at least 1"):
            await collect(generator, request(), max_tokens=0)

    played(scenario)


def test_a_pool_too_small_for_one_sequence_is_refused():
    with pytest.raises(ValueError, match="would never finish"):
        pair(kv_bytes=8)


def test_a_dead_device_fails_what_runs_and_what_comes():
    async def scenario(generator, embedder):
        call = asyncio.create_task(embedder.embed(request(kind=Kind.EMBED), [range(8)], deadline=None))
        with pytest.raises(BackendDown, match="a duration must be at least 0"):
            await collect(generator, request())
        with pytest.raises(BackendDown, match="a duration must be at least 0"):
            await call
        with pytest.raises(BackendDown):
            await generator.check()

    with pytest.raises(ValueError, match="a duration must be at least 0"):
        played(scenario, batch_time=lambda _: -1.0)


def test_stopping_fails_what_runs():
    async def main():
        generator, _ = pair()
        await generator.start()
        answer = asyncio.create_task(collect(generator, request()))
        await asyncio.sleep(1.5)
        await generator.stop()
        with pytest.raises(BackendDown, match="stopped"):
            await answer

    run(main())
