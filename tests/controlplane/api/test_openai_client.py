"""OpenAI's own client, unmodified, over a real socket."""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import numpy as np
import openai
import pytest

from controlplane.api.settings import ApiKey, ApiSettings
from controlplane.core.ports import BackendFailed
from controlplane.service.intake import Caller
from tests.controlplane.api.stage import CHAT_MODEL, EMBED_MODEL, Stage, listening, staged, until

_KEY = "sk-of-the-tests"
_TEXT = "Hello wörld\u2028!"
_HI: list[dict[str, str]] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def locked() -> AsyncIterator[Stage]:
    key = ApiKey(hashlib.sha256(_KEY.encode()).hexdigest(), Caller("tests"))
    async with staged(ApiSettings(api_keys=(key,)), admission={"max_waiting": 0, "engine_queue": 0}) as stage:
        yield stage


@pytest.fixture
async def client(locked: Stage) -> AsyncIterator[openai.AsyncOpenAI]:
    async with listening(locked.app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=_KEY) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI):
    reply = await client.chat.completions.create(model=CHAT_MODEL, messages=_HI, max_tokens=9)
    assert reply.choices[0].message.content == _TEXT
    assert reply.usage is not None
    assert reply.usage.total_tokens == 6


async def test_streamed_chat(client: openai.AsyncOpenAI):
    stream = await client.chat.completions.create(
        model=CHAT_MODEL, messages=_HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == _TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_completion(client: openai.AsyncOpenAI):
    reply = await client.completions.create(model=CHAT_MODEL, prompt=["a", "b"])
    assert [choice.text for choice in reply.choices] == [_TEXT, _TEXT]


async def test_embeddings_which_it_asks_for_in_base64(client: openai.AsyncOpenAI, locked: Stage):
    reply = await client.embeddings.create(model=EMBED_MODEL, input=["a", "bc"])
    expected = [locked.embedder.vector(text) for text in (b"a", b"bc")]
    np.testing.assert_array_equal([row.embedding for row in reply.data], expected)
    assert reply.usage.prompt_tokens == 3


async def test_models(client: openai.AsyncOpenAI):
    assert [model.id async for model in client.models.list()] == [CHAT_MODEL, EMBED_MODEL]
    assert (await client.models.retrieve(CHAT_MODEL)).id == CHAT_MODEL


async def test_its_errors_are_typed(client: openai.AsyncOpenAI):
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nobody", messages=_HI)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model=CHAT_MODEL, messages=_HI, extra_body={"wish": 1})


async def test_a_stream_lost_midway_raises(client: openai.AsyncOpenAI, locked: Stage):
    locked.generator.script.fail_before[2] = BackendFailed("lost")
    stream = await client.chat.completions.create(model=CHAT_MODEL, messages=_HI, stream=True)
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass


async def test_it_comes_back_after_the_time_it_was_told(client: openai.AsyncOpenAI, locked: Stage):
    locked.generator.script.hold_before[1] = (release := asyncio.Event())
    ask = client.chat.completions.create
    running = [asyncio.create_task(ask(model=CHAT_MODEL, messages=_HI)) for _ in range(4)]
    await until(lambda: len(locked.generator.live) == 4)
    with pytest.raises(openai.RateLimitError) as full:
        await client.with_options(max_retries=0).chat.completions.create(model=CHAT_MODEL, messages=_HI)
    assert float(full.value.response.headers["retry-after-ms"]) >= 1
    release.set()
    reply = await ask(model=CHAT_MODEL, messages=_HI)
    assert reply.choices[0].message.content == _TEXT
    await asyncio.gather(*running)
