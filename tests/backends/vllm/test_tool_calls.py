"""Tool calls on a real engine: required calls are generated and parsed, whatever the model prefers."""

import json

import pytest

from controlplane.core.errors import Refused
from controlplane.core.generation import ChatPrompt, Sampling
from tests.engines import complete, text_of

pytestmark = [pytest.mark.engine, pytest.mark.untimed, pytest.mark.asyncio(loop_scope="session")]

DIGIT = {
    "type": "object", "required": ["a"], "additionalProperties": False,
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
}  # fmt: skip
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": DIGIT, "strict": True},
}


async def test_a_required_tool_is_called(tiny_vllm):
    chat = ChatPrompt([{"role": "user", "content": "1+1"}], [ADD], "required")
    prompt = await tiny_vllm.render_chat(chat)
    deltas = await complete(tiny_vllm, prompt, Sampling(max_tokens=200, temperature=1.0, seed=4), chat)
    calls = [call for d in deltas for call in d.tool_calls]
    assert calls[0]["function"]["name"] == "add"
    assert calls[0]["id"]
    first = [c for c in calls if c["index"] == 0]
    arguments = json.loads("".join(c["function"].get("arguments", "") for c in first))
    assert arguments["a"] in range(10)


async def test_a_named_tool_is_called_and_ends_with_stop(tiny_vllm):
    choice = {"type": "function", "function": {"name": "add"}}
    chat = ChatPrompt([{"role": "user", "content": "1+1"}], [ADD], choice)
    prompt = await tiny_vllm.render_chat(chat)
    deltas = await complete(tiny_vllm, prompt, Sampling(max_tokens=200, temperature=1.0, seed=4), chat)
    calls = [call for d in deltas for call in d.tool_calls]
    assert calls[0]["function"]["name"] == "add"
    assert json.loads("".join(c["function"].get("arguments", "") for c in calls))["a"] in range(10)
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize("function", [{"parameters": DIGIT, "strict": False}, {}])
async def test_arguments_of_a_required_call_are_an_object_without_strict(tiny_vllm, function):
    tool = {"type": "function", "function": {"name": "add", **function}}
    chat = ChatPrompt([{"role": "user", "content": "1+1"}], [tool], "required")
    prompt = await tiny_vllm.render_chat(chat)
    for seed in range(3):
        sampling = Sampling(max_tokens=400, temperature=1.0, seed=seed)
        deltas = await complete(tiny_vllm, prompt, sampling, chat)
        calls = [call for d in deltas for call in d.tool_calls if call["index"] == 0]
        text = "".join(call["function"].get("arguments", "") for call in calls)
        assert text.startswith("{")
        if deltas[-1].finish_reason != "length":
            arguments = json.loads(text)
            assert not function or arguments["a"] in range(10)


async def test_tool_choice_none_renders_and_parses_no_tools(tiny_vllm):
    messages = [{"role": "user", "content": "1+1"}]
    chat = ChatPrompt(messages, [ADD], "none")
    assert await tiny_vllm.render_chat(chat) == await tiny_vllm.render_chat(ChatPrompt(messages))
    deltas = await complete(tiny_vllm, await tiny_vllm.render_chat(chat), Sampling(max_tokens=8), chat)
    assert text_of(deltas)
    assert not any(d.tool_calls for d in deltas)


async def test_naming_an_unknown_tool_is_refused(tiny_vllm):
    chat = ChatPrompt(
        [{"role": "user", "content": "x"}], [ADD], {"type": "function", "function": {"name": "sub"}}
    )
    with pytest.raises(Refused, match="'sub'"):
        await complete(tiny_vllm, "1+1", Sampling(max_tokens=4), chat)
