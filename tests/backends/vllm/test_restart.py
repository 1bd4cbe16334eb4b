"""Restart and warm-up of a real engine."""

import asyncio
import multiprocessing
import os
import re
import signal
import time
import weakref
from multiprocessing.process import BaseProcess

import pytest

from backends.vllm.client import VllmGenerator
from controlplane.core.errors import BackendDown
from controlplane.core.generation import Sampling
from controlplane.core.start_stages import STAGE_OBSERVER, StartStage
from controlplane.policy.engine.options import EngineOptions
from tests.engines import TINY_ARGUMENTS, complete, running_vllm, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.untimed, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "The quick brown fox reads a file and"


def greedy(max_tokens: int, **more) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, **more)


async def test_a_killed_engine_can_be_started_again():
    async with running_vllm(scheduling=EngineOptions()) as generator:
        expected = tokens_of(await complete(generator, PROMPT, greedy(8)))
        sizes = generator.geometry, generator.kv_bytes
        down = asyncio.get_running_loop().create_future()
        generator.on_down = down.set_result
        (process,) = generator._engine_children()
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            assert await down == "the vLLM engine died; its log says why"
        with pytest.raises(BackendDown):
            await generator.check()
        assert await generator.tokenize(PROMPT)
        await generator.stop()
        await generator.start()
        assert (generator.geometry, generator.kv_bytes) == sizes
        assert tokens_of(await complete(generator, PROMPT, greedy(8))) == expected
        await generator.set_options({"urgency": 0.75})
        assert generator.state().running == 0


async def test_a_start_that_hangs_can_be_cancelled(monkeypatch):
    generator = VllmGenerator("tandem/tiny-llama", engine_arguments=TINY_ARGUMENTS)
    before = set(multiprocessing.active_children())
    loop, spawned, spawn = asyncio.get_running_loop(), asyncio.Event(), BaseProcess.start

    def spawn_and_stop(process):
        spawn(process)
        os.kill(process.pid, signal.SIGSTOP)
        loop.call_soon_threadsafe(spawned.set)

    monkeypatch.setattr(BaseProcess, "start", spawn_and_stop)
    start = asyncio.create_task(generator.start())
    async with asyncio.timeout(120):
        await spawned.wait()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    # One that an earlier test killed may be reaped meanwhile.
    assert set(multiprocessing.active_children()) <= before


async def test_an_engine_that_dies_before_its_first_request_ends_the_start(monkeypatch):
    """vLLM ends no pending call when its engine dies, and no stream of a request is open yet."""
    from backends.vllm import engine

    bound = engine.bound_prompt_logits

    async def kill_and_bound(llm):
        [process] = generator._engine_children()
        os.kill(process.pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_soon(os.kill, process.pid, signal.SIGKILL)
        return await bound(llm)

    monkeypatch.setattr(engine, "bound_prompt_logits", kill_and_bound)
    generator = VllmGenerator("tandem/tiny-llama", engine_arguments=TINY_ARGUMENTS)
    async with asyncio.timeout(120):
        with pytest.raises(BackendDown, match="the vLLM engine died"):
            await generator.start()


async def test_a_stopped_engine_is_freed_at_once():
    """The server freezes its objects, so its collector would free none that is part of a cycle."""
    async with running_vllm(scheduling=EngineOptions()) as generator:
        await complete(generator, PROMPT, greedy(2))
        assert generator._engine is not None
        llm = weakref.ref(generator._engine._llm)
    assert llm() is None


async def test_an_engine_without_a_description_is_shut_down(monkeypatch):
    from backends.vllm import engine

    def fail(config):
        raise KeyError("hidden_size")

    monkeypatch.setattr(engine, "geometry_of", fail)
    generator = VllmGenerator("tandem/tiny-llama", engine_arguments=TINY_ARGUMENTS)
    with pytest.raises(BackendDown, match=r"did not start for .* 'hidden_size'"):
        await generator.start()
    # On a busy machine vLLM kills the process, and does not wait until it has ended.
    for process in generator._engine_children():
        process.join(10)
    assert generator._engine_children() == []


async def test_the_first_logprobs_and_structured_output_compile_nothing():
    """The warm-up has run these paths, and its note says so."""
    observed = Observed()
    token = STAGE_OBSERVER.set(observed)
    async with running_vllm() as generator:
        STAGE_OBSERVER.reset(token)
        assert observed.stages == [StartStage.WARMING_UP]
        [line] = observed.notes
        assert re.fullmatch(
            r"logprobs [\d.]+ s, samples [\d.]+ s, structured output [\d.]+ s, prompts [\d.]+ s", line
        ), line  # fmt: skip
        plain = await seconds_of(complete(generator, PROMPT, greedy(4)))
        for sampling in (
            greedy(4, logprobs=5),
            greedy(4, logprobs=5, prompt_logprobs=2),
            Sampling(max_tokens=4, n=3, logprobs=2),
            Sampling(max_tokens=8, structure={"type": "json_object"}),
        ):
            assert await seconds_of(complete(generator, PROMPT, sampling)) < plain + 1.0, sampling


class Observed:
    def __init__(self) -> None:
        self.stages: list[StartStage] = []
        self.notes: list[str] = []
        self.enter, self.note = self.stages.append, self.notes.append


async def seconds_of(work) -> float:
    started = time.monotonic()
    await work
    return time.monotonic() - started
