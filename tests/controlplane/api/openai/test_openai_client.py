"""OpenAI's own client, unmodified, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

from tests.controlplane.api.example_bodies import HI, SECRET
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    HELLO,
    MAX_RUNNING,
    RERANK_MODEL,
    TEXT,
    Stage,
    listening,
    staged,
)

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture
async def client(locked: Stage) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        listening(locked.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=SECRET) as client,
    ):
        yield client


async def test_chat(client: openai.AsyncOpenAI):
    reply = await client.chat.completions.create(model=CHAT_MODEL, messages=HI, max_tokens=9)
    assert reply.choices[0].message.content == TEXT
    assert reply.usage is not None
    assert reply.usage.total_tokens == 5


async def test_streamed_chat(client: openai.AsyncOpenAI):
    stream = await client.chat.completions.create(
        model=CHAT_MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_completion(client: openai.AsyncOpenAI):
    reply = await client.completions.create(model=CHAT_MODEL, prompt=["a", "b"])
    assert [choice.text for choice in reply.choices] == [TEXT, TEXT]


async def test_embeddings_in_base64(client: openai.AsyncOpenAI):
    reply = await client.embeddings.create(model=EMBED_MODEL, input=["a", "bc"])
    plain = await client.embeddings.create(model=EMBED_MODEL, input=["a", "bc"], encoding_format="float")
    got, expected = ([row.embedding for row in data] for data in (reply.data, plain.data))
    np.testing.assert_array_equal(np.float32(got), np.float32(expected))
    assert reply.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    "fields", [{}, {"instructions": "Be short."}, {"tools": [TOOL]}, {"reasoning": {"effort": "low"}}]
)
async def test_input_tokens_are_those_of_the_response(client: openai.AsyncOpenAI, fields: dict[str, Any]):
    counted = await client.responses.input_tokens.count(model=CHAT_MODEL, input="hi", **fields)
    response = await client.responses.create(model=CHAT_MODEL, input="hi", **fields)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == response.usage.input_tokens > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"personality": "friendly"}, "personality"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": "x" * 300}, "input"),
    ],
)
async def test_input_that_cannot_be_counted_is_named(client: openai.AsyncOpenAI, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.input_tokens.count(**{"model": CHAT_MODEL, "input": "hi"} | fields)
    assert caught.value.param == param


async def test_models(client: openai.AsyncOpenAI):
    served = [CHAT_MODEL, EMBED_MODEL, RERANK_MODEL]
    assert [model.id async for model in client.models.list()] == served
    assert (await client.models.retrieve(CHAT_MODEL)).id == CHAT_MODEL


async def test_errors_are_typed(client: openai.AsyncOpenAI):
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nobody", messages=HI)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model=CHAT_MODEL, messages=HI, extra_body={"wish": 1})


async def test_stream_that_fails_midway_raises(client: openai.AsyncOpenAI, locked: Stage):
    locked.generator.default = replace(HELLO, request_fails_after=2)
    stream = await client.chat.completions.create(model=CHAT_MODEL, messages=HI, stream=True)
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass


async def test_client_honours_retry_after():
    async with (
        staged(is_stepped=True, admission={"max_waiting": 0, "engine_queue": 0}) as stage,
        listening(stage.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=SECRET) as client,
    ):
        once = client.with_options(max_retries=0)
        ask = {"model": CHAT_MODEL, "messages": HI}
        running = [asyncio.create_task(once.chat.completions.create(**ask)) for _ in range(MAX_RUNNING)]
        await stage.generator.until_runs(MAX_RUNNING)
        with pytest.raises(openai.RateLimitError) as full:
            await once.chat.completions.create(**ask)
        assert float(full.value.response.headers["retry-after-ms"]) >= 1
        stage.generator.allow(len(HELLO.words))
        await asyncio.gather(*running)
        again = asyncio.create_task(client.chat.completions.create(**ask))
        await stage.generator.until_runs(MAX_RUNNING + 1)
        stage.generator.allow(len(HELLO.words))
        assert (await again).choices[0].message.content == TEXT
