"""The vLLM backend on a real engine: sampling, errors, chat, aborts and the end of the engine."""

import asyncio
import json
import multiprocessing
import os
import signal
from contextlib import aclosing
from multiprocessing.process import BaseProcess

import pytest

from backends.vllm.client import VllmGenerator
from controlplane.core.errors import BackendDown, Refused
from controlplane.core.generation import ChatPrompt, Sampling
from controlplane.policy.engine.options import EngineOptions
from tests.engines import (
    BLOCK_TOKENS,
    BLOCKS,
    TINY_ARGUMENTS,
    a_request,
    complete,
    running_vllm,
    text_of,
    tokens_of,
)

pytestmark = [pytest.mark.engine, pytest.mark.untimed, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "The quick brown fox reads a file and"
DIGIT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


def greedy(max_tokens: int = 24, **more) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, **more)


async def test_geometry_is_what_vllm_allocates(tiny_vllm):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = tiny_vllm._engine.config
    page = FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=config.model_config.get_num_kv_heads(config.parallel_config),
        head_size=config.model_config.get_head_size(),
        dtype=config.model_config.dtype,
    ).page_size_bytes
    layers = config.model_config.get_num_layers(config.parallel_config)
    assert tiny_vllm.geometry.block_tokens == BLOCK_TOKENS
    assert tiny_vllm.geometry.bytes_per_block == layers * page
    assert tiny_vllm.kv_bytes == (BLOCKS - 1) * layers * page
    assert (tiny_vllm.max_model_tokens, tiny_vllm.max_running) == (1024, 8)


async def test_the_step_cost_prior_is_known_before_the_first_step(tiny_vllm):
    assert tiny_vllm.step_cost is not None
    # For a model of a few million weights the fixed cost per step dominates.
    assert 0.002 < tiny_vllm.step_cost.step < 0.1
    assert 0 < tiny_vllm.step_cost.prompt_token < tiny_vllm.step_cost.step


async def test_greedy_is_repeatable_and_deltas_add_up(tiny_vllm):
    first, second = await complete(tiny_vllm, PROMPT, greedy()), await complete(tiny_vllm, PROMPT, greedy())
    assert tokens_of(first) == tokens_of(second)
    assert len(tokens_of(first)) == 24
    assert text_of(first) == tiny_vllm._engine.tokenizer.decode(tokens_of(first))
    assert len(first) > 12
    assert [d.finish_reason for d in first] == [None] * (len(first) - 1) + ["length"]


async def test_a_repeated_prompt_reports_its_cached_tokens(tiny_vllm):
    prompt = [7] * (3 * BLOCK_TOKENS + 1)
    await complete(tiny_vllm, prompt, greedy(1))
    again = await complete(tiny_vllm, prompt, greedy(1))
    assert again[-1].cached_tokens == 3 * BLOCK_TOKENS


async def test_two_samples_stream_concurrently(tiny_vllm):
    deltas = await complete(tiny_vllm, PROMPT, Sampling(max_tokens=12, n=2, seed=5, ignore_eos=True))
    assert {d.index for d in deltas} == {0, 1}
    assert [len(tokens_of(deltas, i)) for i in (0, 1)] == [12, 12]
    assert tokens_of(deltas, 0) != tokens_of(deltas, 1)
    assert sum(d.finish_reason == "length" for d in deltas) == 2


async def test_seed_repeats_a_sample(tiny_vllm):
    sampling = Sampling(max_tokens=12, temperature=1.0, seed=11)
    assert tokens_of(await complete(tiny_vllm, PROMPT, sampling)) == tokens_of(
        await complete(tiny_vllm, PROMPT, sampling)
    )


async def test_stop_string_ends_the_text_before_it(tiny_vllm):
    whole = text_of(await complete(tiny_vllm, PROMPT, greedy()))
    stop = whole[5:8]
    at = whole.index(stop)
    cut = await complete(tiny_vllm, PROMPT, greedy(stop=(stop,)))
    assert text_of(cut) == whole[:at]
    assert (cut[-1].finish_reason, cut[-1].stop_reason) == ("stop", stop)
    kept = await complete(tiny_vllm, PROMPT, greedy(stop=(stop,), include_stop_str_in_output=True))
    assert text_of(kept) == whole[:at] + stop


async def test_the_stop_reason_is_the_stop_token(tiny_vllm):
    token = tokens_of(await complete(tiny_vllm, PROMPT, greedy()))[0]
    deltas = await complete(tiny_vllm, PROMPT, greedy(stop_token_ids=(token,)))
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", token)


async def test_logprobs_list_the_likeliest_token_first(tiny_vllm):
    deltas = await complete(tiny_vllm, PROMPT, greedy(6, logprobs=3, prompt_logprobs=1))
    positions = [position for d in deltas for position in d.logprobs]
    assert len(positions) == 6
    for position in positions:
        assert len(position.top) == 3
        assert position.top[0] == (position.token, position.logprob)
        assert [p for _, p in position.top] == sorted((p for _, p in position.top), reverse=True)
        assert position.logprob < 0
    prompt = deltas[0].prompt_logprobs
    assert len(prompt) == len(await tiny_vllm.tokenize(PROMPT))
    assert prompt[0] is None
    assert all(entry is not None and entry.logprob < 0 for entry in prompt[1:])
    assert all(not d.prompt_logprobs for d in deltas[1:])
    assert (await complete(tiny_vllm, PROMPT, greedy(1, logprobs=0)))[0].logprobs[0].top == ()


async def test_log_probabilities_of_a_long_prompt_are_those_of_its_generation(tiny_vllm):
    """The prompt has many times more tokens than logits that the worker computes at once (8)."""
    assert tiny_vllm.max_prompt_logprobs == tiny_vllm.max_model_tokens
    generated = await complete(tiny_vllm, PROMPT, greedy(400, logprobs=0, ignore_eos=True))
    expected = [position for delta in generated for position in delta.logprobs]
    start = await tiny_vllm.tokenize(PROMPT)
    whole = [*start, *tokens_of(generated)]
    first = (await complete(tiny_vllm, whole, greedy(1, prompt_logprobs=1)))[0]
    found = first.prompt_logprobs[len(start) :]
    assert len(found) == len(expected) == 400
    assert [entry.token for entry in found] == [entry.token for entry in expected]
    # The model computes in bfloat16, and a prompt takes other kernels than one token.
    assert all(abs(a.logprob - b.logprob) < 0.1 for a, b in zip(found, expected, strict=True))


async def test_logit_bias_forces_a_token(tiny_vllm):
    deltas = await complete(tiny_vllm, PROMPT, greedy(4, logit_bias={"321": 100.0}))
    assert tokens_of(deltas) == [321] * 4


async def test_output_conforms_to_a_json_schema(tiny_vllm):
    structure = {"type": "json_schema", "schema": DIGIT}
    for seed in range(3):
        deltas = await complete(
            tiny_vllm, PROMPT, Sampling(max_tokens=40, temperature=1.0, seed=seed, structure=structure)
        )
        assert json.loads(text_of(deltas))["a"] in range(10)
        assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("structure", "allowed"),
    [
        ({"type": "choice", "value": ["yes", "no"]}, {"yes", "no"}),
        ({"type": "regex", "value": "[0-2]"}, {"0", "1", "2"}),
        ({"type": "grammar", "value": 'root ::= "left" | "right"'}, {"left", "right"}),
    ],
)
async def test_output_conforms_to_other_structures(tiny_vllm, structure, allowed):
    assert text_of(await complete(tiny_vllm, PROMPT, Sampling(max_tokens=8, structure=structure))) in allowed


async def test_json_object_output_begins_with_a_brace(tiny_vllm):
    deltas = await complete(tiny_vllm, PROMPT, Sampling(max_tokens=8, structure={"type": "json_object"}))
    assert text_of(deltas).startswith("{")


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(max_tokens=4, temperature=-1.0), "temperature"),
        (Sampling(max_tokens=4, top_p=2.0), "top_p"),
        (Sampling(max_tokens=4, logprobs=1000), "logprobs"),
        (Sampling(max_tokens=4, logit_bias={"99999": 1.0}), "logit_bias"),
        (Sampling(max_tokens=4, logit_bias={"x": 1.0}), "logit_bias"),
        (Sampling(max_tokens=4, min_tokens=1, stop_token_ids=(7, 10**30)), "has the id 1000000"),
        (
            Sampling(max_tokens=4, structure={"type": "json_schema", "schema": {"type": "odd"}}),
            "(?i)schema|type",
        ),
        (Sampling(max_tokens=4, structure={"type": "xml"}), "response format"),
    ],
)
async def test_invalid_sampling_parameters_are_refused(tiny_vllm, sampling, message):
    with pytest.raises(Refused, match=message):
        await complete(tiny_vllm, PROMPT, sampling)


@pytest.mark.parametrize("prompt", [[], [99_999], [7] * 1025])
async def test_impossible_prompts_are_refused(tiny_vllm, prompt):
    with pytest.raises(Refused):
        await complete(tiny_vllm, prompt, greedy(4))


async def test_closing_a_stream_aborts_in_the_engine(tiny_vllm):
    before = tiny_vllm.state().preemptions
    prompt = [9] * 900
    sampling = greedy(100, ignore_eos=True)
    async with aclosing(tiny_vllm.generate(a_request(prompt, sampling), prompt, sampling)) as deltas:
        await anext(deltas)
        held = tiny_vllm.state()
        assert held.running == 1
        assert held.used_bytes >= tiny_vllm.geometry.bytes(900)
        assert held.total_bytes == tiny_vllm.kv_bytes
    assert (tiny_vllm.state().running, tiny_vllm.state().used_bytes) == (0, 0)
    # Two requests that fill the pool: leaked blocks of the closed request would force a preemption.
    both = [complete(tiny_vllm, [10 + i] * 950, greedy(40, ignore_eos=True)) for i in range(2)]
    done = await asyncio.gather(*both)
    assert [len(tokens_of(d)) for d in done] == [40, 40]
    assert tiny_vllm.state().preemptions == before


async def test_cancelling_the_reader_aborts_in_the_engine(tiny_vllm):
    started = asyncio.Event()
    sampling = greedy(900, ignore_eos=True)

    async def read():
        async for _ in tiny_vllm.generate(a_request([5], sampling), [5], sampling):
            started.set()

    reader = asyncio.create_task(read())
    await asyncio.wait_for(started.wait(), 60)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert tiny_vllm.state().running == 0
    assert len(tokens_of(await complete(tiny_vllm, [6], greedy(3, ignore_eos=True)))) == 3


async def test_a_pool_that_is_too_small_causes_preemptions(tiny_vllm):
    before = tiny_vllm.state().preemptions
    runs = [complete(tiny_vllm, [20 + i] * 250, greedy(200, ignore_eos=True)) for i in range(6)]
    done = await asyncio.gather(*runs)
    assert [len(tokens_of(d)) for d in done] == [200] * 6
    assert tiny_vllm.state().preemptions > before


async def test_chat_is_rendered_by_the_models_template(tiny_vllm):
    parts = [{"type": "text", "text": "One and"}, {"type": "text", "text": "one?"}]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    tokens = await tiny_vllm.render_chat(
        ChatPrompt(
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": parts},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
            ]
        )
    )
    assert tiny_vllm._engine.tokenizer.decode(tokens) == (
        "<|begin|><|system|>Be brief.<|user|>One and\none?<|assistant|>"
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|><|tool|>2<|assistant|>'
    )


async def test_long_and_short_chats_are_rendered_alike(tiny_vllm):
    # Longer than what is rendered on the event loop, within the context.
    text = "word " * 900
    long = await tiny_vllm.render_chat(ChatPrompt([{"role": "user", "content": text}]))
    assert text in tiny_vllm._engine.tokenizer.decode(long)
    assert await tiny_vllm.tokenize(text) == tiny_vllm._engine.tokenizer.encode(text)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (ChatPrompt([{"role": "narrator", "content": "x"}]), "unknown role narrator"),
        (ChatPrompt([{"role": "user", "content": [{"type": "image_url"}]}]), "image_url.*only text"),
        (
            ChatPrompt([{"role": "user", "content": "x"}], template_options={"chat_template": "y"}),
            "may not set",
        ),
    ],
)
async def test_chats_that_cannot_be_rendered_are_refused(tiny_vllm, prompt, message):
    with pytest.raises(Refused, match=message):
        await tiny_vllm.render_chat(prompt)


async def test_check_passes_while_busy(tiny_vllm):
    sampling = greedy(200, ignore_eos=True)
    busy = asyncio.create_task(complete(tiny_vllm, PROMPT, sampling))
    await tiny_vllm.check()
    assert len(tokens_of(await busy)) == 200


async def test_unknown_engine_arguments_stop_the_start():
    generator = VllmGenerator("tandem/tiny-llama", engine_arguments={"max_num_seq": 8, "model": "x"})
    with pytest.raises(ValueError, match=r"'max_num_seq'; did you mean max_num_seqs.*model is set by"):
        await generator.start()
    with pytest.raises(BackendDown):
        await generator.check()


async def test_cancelled_start_leaves_no_engine(monkeypatch):
    generator = VllmGenerator("tandem/tiny-llama", engine_arguments=TINY_ARGUMENTS)
    before = set(multiprocessing.active_children())
    loop, spawned, spawn = asyncio.get_running_loop(), asyncio.Event(), BaseProcess.start

    def spawn_and_tell(process):
        spawn(process)
        loop.call_soon_threadsafe(spawned.set)

    monkeypatch.setattr(BaseProcess, "start", spawn_and_tell)
    start = asyncio.create_task(generator.start())
    async with asyncio.timeout(120):
        await spawned.wait()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    assert set(multiprocessing.active_children()) == before


async def test_a_killed_engine_ends_streams_and_commands_with_backend_down():
    before = set(multiprocessing.active_children())
    async with running_vllm(scheduling=EngineOptions()) as generator:
        sampling = greedy(900, ignore_eos=True)
        deltas = generator.generate(a_request([5], sampling), [5], sampling)
        await anext(deltas)
        (process,) = set(multiprocessing.active_children()) - before
        # The engine dies while a command is pending.
        os.kill(process.pid, signal.SIGSTOP)
        command = asyncio.create_task(generator.set_options({"urgency": 0.75}))
        for _ in range(3):
            await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(BackendDown):
            async with asyncio.timeout(60):
                await command
        with pytest.raises(BackendDown):
            async with asyncio.timeout(60):
                async for _ in deltas:
                    pass
        with pytest.raises(BackendDown):
            await generator.check()
        with pytest.raises(BackendDown):
            await complete(generator, [5], sampling)
        with pytest.raises(BackendDown):
            generator.state()


async def test_stopping_ends_open_streams():
    """With Tandem's scheduler, as served: an open stream is known to it until it ends."""
    async with running_vllm(scheduling=EngineOptions()) as generator:
        sampling = greedy(900, ignore_eos=True)
        deltas = generator.generate(a_request([5], sampling), [5], sampling)
        await anext(deltas)
        chat = ChatPrompt(
            [{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "add"}}]
        )
        with pytest.raises(Refused, match=r"models\.chat\.tool_parser"):
            await complete(generator, [5], sampling, chat)
        await generator.stop()
        with pytest.raises(BackendDown):
            async with asyncio.timeout(60):
                async for _ in deltas:
                    pass
        await generator.stop()
