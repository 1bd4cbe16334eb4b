"""Scripted engines follow their scripts, implement the ports and record requests."""

import asyncio
from itertools import count

import numpy as np
import pytest

from backends.testing.scripted import Script, ScriptedEmbedder, ScriptedGenerator
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.clock import Instant
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.core.generation import ChatPrompt, Sampling
from controlplane.core.ports import Embedder, Generator
from controlplane.core.request import Kind, Request
from tests import example_requests

_numbers = count()


def a_request(*, kind=Kind.GENERATE, sequences=1) -> Request:
    name = f"r{next(_numbers)}"
    return example_requests.a_request(name, 3, 8, kind=kind, model="scripted", sequences=sequences)


async def deltas_of(generator: Generator, sampling: Sampling, request: Request | None = None):
    return [d async for d in generator.generate(request or a_request(), [1, 2, 3], sampling)]


async def started(engine):
    await engine.start()
    return engine


async def test_output_follows_the_script():
    generator = await started(ScriptedGenerator(default=Script(tokens=3, words=("a ", "b "))))
    deltas = await deltas_of(generator, Sampling(max_tokens=8))
    assert "".join(d.text for d in deltas) == "a b a "
    assert [d.finish_reason for d in deltas] == [None, None, "stop"]
    [seen] = generator.runs
    assert (seen.done, seen.end, seen.prompt) == (3, "finished", (1, 2, 3))


async def test_max_tokens_ends_output_with_length():
    generator = await started(ScriptedGenerator(default=Script(tokens=9)))
    deltas = await deltas_of(generator, Sampling(max_tokens=2))
    assert [d.finish_reason for d in deltas] == [None, "length"]
    [only] = await deltas_of(generator, Sampling(max_tokens=0))
    assert (only.text, only.finish_reason) == ("", "length")


async def test_samples_logprobs_and_tool_calls():
    calls = ({"index": 0, "function": {"name": "f", "arguments": "{}"}},)
    generator = await started(ScriptedGenerator())
    generator.upcoming.append(Script(tokens=1, tool_calls=calls, cached_tokens=2))
    first, second = await deltas_of(generator, Sampling(max_tokens=8, n=2, logprobs=2, prompt_logprobs=0))
    assert (first.index, second.index) == (0, 1)
    assert (first.finish_reason, first.tool_calls, first.cached_tokens) == ("tool_calls", calls, 2)
    assert len(first.logprobs[0].top) == 2
    assert len(first.prompt_logprobs) == 3
    assert first.prompt_logprobs[0] is None


def test_tokens_take_the_scripted_time():
    async def main():
        generator = await started(
            ScriptedGenerator(prefill_seconds=1.0, prompt_token_seconds=0.1, token_seconds=0.5)
        )
        loop = asyncio.get_running_loop()
        return [loop.time() async for _ in generator.generate(a_request(), [1, 2, 3], Sampling(max_tokens=3))]

    assert run(main()) == pytest.approx([1.3, 1.8, 2.3])


async def test_a_stepped_engine_advances_only_on_allow():
    generator = await started(ScriptedGenerator(is_stepped=True))
    answer = generator.generate(a_request(), [1], Sampling(max_tokens=3))
    first = asyncio.ensure_future(anext(answer))
    await generator.until_runs(1)
    assert generator.runs[0].done == 0
    generator.allow(3)
    await first
    assert [d.finish_reason async for d in answer] == [None, "length"]
    with pytest.raises(RuntimeError, match="is_stepped=True"):
        ScriptedGenerator().allow()


async def test_closing_a_stream_aborts_the_request():
    generator = await started(ScriptedGenerator())
    request = a_request()
    answer = generator.generate(request, [1], Sampling(max_tokens=8))
    await anext(answer)
    assert generator.state().running == 1
    await answer.aclose()
    assert generator.aborted == [request.id]
    assert generator.state().running == 0


async def test_scripted_failures():
    generator = await started(ScriptedGenerator())
    generator.upcoming.extend(
        [Script(refusal="no"), Script(request_fails_after=1), Script(engine_fails_after=2)]
    )
    with pytest.raises(Refused, match="no"):
        await deltas_of(generator, Sampling(max_tokens=8))
    with pytest.raises(BackendFailed, match="after 1 tokens"):
        await deltas_of(generator, Sampling(max_tokens=8))
    with pytest.raises(BackendDown, match="died"):
        await deltas_of(generator, Sampling(max_tokens=8))
    assert [seen.end for seen in generator.runs] == ["failed", "died"]
    with pytest.raises(BackendDown):
        generator.state()
    await generator.start()
    assert len(await deltas_of(generator, Sampling(max_tokens=8))) == 8


async def test_die_fails_all_running_requests():
    generator = await started(ScriptedGenerator(is_stepped=True, max_running=1))
    answers = [asyncio.create_task(deltas_of(generator, Sampling(max_tokens=8))) for _ in range(2)]
    await generator.until_runs(2)
    assert (generator.state().running, generator.state().waiting) == (1, 1)
    generator.die()
    results = await asyncio.gather(*answers, return_exceptions=True)
    assert [type(result) for result in results] == [BackendDown, BackendDown]


async def test_a_preempted_request_keeps_its_output():
    generator = await started(ScriptedGenerator(is_stepped=True))
    request = a_request()
    answer = asyncio.create_task(deltas_of(generator, Sampling(max_tokens=8), request))
    await generator.until_runs(1)
    generator.allow(2)
    await generator.preempt(request.id)
    assert (await answer)[-1].finish_reason == "preempted"
    assert generator.runs[0].end == "preempted"
    assert generator.state().preemptions == 1


async def test_a_request_beyond_the_context_length_is_rejected():
    generator = await started(ScriptedGenerator(max_model_tokens=10))
    with pytest.raises(Refused, match="the model holds 10"):
        await deltas_of(generator, Sampling(max_tokens=8))


async def test_chat_messages_are_concatenated():
    generator = await started(ScriptedGenerator())
    messages = [
        {"role": "system", "content": "é"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
    ]
    assert bytes(await generator.render_chat(ChatPrompt(messages))).decode() == "éb"
    with pytest.raises(Refused, match="only text"):
        await generator.render_chat(ChatPrompt([{"role": "user", "content": [{"type": "image_url"}]}]))


async def test_vectors_depend_on_token_ids_only():
    embedder = await started(ScriptedEmbedder(dimension=16))
    inputs = await embedder.tokenize(["one", "two", "one"])
    request = a_request(kind=Kind.EMBED)
    found = await embedder.embed(request, inputs, deadline=Instant(5))
    assert found.shape == (3, 16)
    assert found.dtype == np.float32
    assert np.allclose(np.linalg.norm(found, axis=1), 1)
    assert (found[0] == found[2]).all()
    assert not np.allclose(found[0], found[1])
    [seen] = embedder.runs
    assert (seen.deadline, seen.end) == (Instant(5), "finished")


async def test_an_embedding_call_can_be_cancelled_and_can_fail():
    embedder = await started(ScriptedEmbedder(is_stepped=True))
    request = a_request(kind=Kind.EMBED)
    leaving = asyncio.create_task(embedder.embed(request, [[1]], deadline=None))
    await embedder.until_runs(1)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert embedder.aborted == [request.id]
    embedder.upcoming.append(Script(request_fails_after=0))
    failing = asyncio.create_task(embedder.embed(request, [[1]], deadline=None))
    await embedder.until_runs(2)
    embedder.allow()
    with pytest.raises(BackendFailed):
        await failing


def test_embedding_takes_the_scripted_time():
    async def main():
        embedder = await started(ScriptedEmbedder(call_seconds=1.0, token_seconds=0.5))
        await embedder.embed(a_request(kind=Kind.EMBED), [[1, 2], [3]], deadline=None)
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(2.5)


def test_both_engines_satisfy_their_ports():
    generator: Generator = ScriptedGenerator()
    embedder: Embedder = ScriptedEmbedder()
    assert embedder.batch_bytes([512] * 100) <= embedder.workspace_bytes
    assert generator.kv_bytes % generator.geometry.bytes_per_block == 0
