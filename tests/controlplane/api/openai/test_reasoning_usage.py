"""The usage of a model with a reasoning parser states reasoning tokens, in chat and in responses."""

from collections.abc import AsyncIterator
from dataclasses import replace

import orjson
import pytest

from controlplane.api.protocol.answers import ChatCompletion
from tests.controlplane.api.example_bodies import CHAT, chat
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    HELLO,
    MODELS,
    Stage,
    events,
    staged,
)

RESPONSES = "/v1/responses"


@pytest.fixture
async def thinking() -> AsyncIterator[Stage]:
    async with staged(models={**MODELS, "chat": {"model": CHAT_MODEL, "reasoning_parser": "qwen3"}}) as stage:
        stage.generator.default = replace(HELLO, tokens=5, reasoning_words=("Let", " me"))
        yield stage


@pytest.mark.parametrize(("n", "expected"), [(1, 2), (3, 6)])
async def test_whole_chat(thinking: Stage, n: int, expected: int):
    answer = await thinking.http.post(CHAT, json=chat(n=n, temperature=1))
    details = {"reasoning_tokens": expected}
    assert answer.json()["usage"]["completion_tokens_details"] == details
    described = ChatCompletion.model_validate_json(answer.content).usage.completion_tokens_details
    assert described is not None and described.model_dump() == details


async def test_streamed_chat(thinking: Stage):
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await thinking.http.post(CHAT, json=chat(stream=True, stream_options=options))
    usages = [orjson.loads(content)["usage"] for content in events(answer)[:-1]]
    found = [usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages]
    assert found == [1, 2, 2, 2, 2, 2]


async def test_chat_and_responses_agree(thinking: Stage):
    response = await thinking.http.post(RESPONSES, json={"model": CHAT_MODEL, "input": "hi"})
    assert response.json()["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    hidden = await thinking.http.post(CHAT, json=chat(include_reasoning=False))
    assert hidden.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


async def test_answer_without_reasoning_states_none(thinking: Stage):
    thinking.generator.default = HELLO
    answer = await thinking.http.post(CHAT, json=chat())
    assert answer.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    text = await thinking.http.post("/v1/completions", json={"model": CHAT_MODEL, "prompt": "hi"})
    assert "completion_tokens_details" not in text.json()["usage"]


async def test_model_without_a_reasoning_parser_states_no_reasoning_tokens(stage: Stage):
    answer = await stage.http.post(CHAT, json=chat())
    assert "completion_tokens_details" not in answer.json()["usage"]
