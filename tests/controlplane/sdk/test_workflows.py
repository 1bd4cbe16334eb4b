"""Structured output, tool loops and retrieval-augmented answers, for both clients."""

import asyncio
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import BaseModel

from controlplane import sdk
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    HELLO,
    RERANK_MODEL,
    TEXT,
    listening,
    staged,
)
from tests.controlplane.sdk.scripted_http import BOTH, Server, call, chat_reply, vectors


class City(BaseModel):
    name: str
    inhabitants: int


# --- structured output -------------------------------------------------------------------------


@BOTH
async def test_parse_returns_an_instance(is_async: bool):  # noqa: FBT001
    server = Server(lambda *_: chat_reply('{"name": "Ulm", "inhabitants": 128928}'))
    found = await call(is_async, server, "parse", "a city", City, model="m", temperature=0)
    assert found == City(name="Ulm", inhabitants=128928)
    (body,) = server.bodies
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "City", "schema": City.model_json_schema(), "strict": True},
    }
    assert body["temperature"] == 0


@BOTH
async def test_output_that_does_not_fit_is_an_error_with_the_output(is_async: bool):  # noqa: FBT001
    server = Server(lambda *_: chat_reply('{"name": "Ul', finish_reason="length"))
    with pytest.raises(sdk.InvalidOutput, match="cut off at the largest number of tokens") as caught:
        await call(is_async, server, "parse", "a city", City, model="m")
    assert caught.value.text == '{"name": "Ul'
    wrong = Server(lambda *_: chat_reply('{"name": "Ulm"}'))
    with pytest.raises(sdk.InvalidOutput, match="inhabitants"):
        await call(is_async, wrong, "parse", "a city", City, model="m")


async def test_the_server_takes_the_schema_of_a_pydantic_model():
    async with staged() as stage, listening(stage.app) as url, sdk.AsyncTandem(url) as tandem:
        text = '{"name":"Ulm","inhabitants":1}'
        stage.generator.default = type(HELLO)(tokens=1, words=(text,))
        assert (await tandem.parse("a city", City, model=CHAT_MODEL)).name == "Ulm"
        sampling = stage.generator.runs[0].sampling
    assert sampling is not None
    assert sampling.structure == {"type": "json_schema", "schema": City.model_json_schema()}


# --- tools ---------------------------------------------------------------------------------------


def weather(city: str, days: int = 1) -> dict[str, Any]:
    """Forecasts the weather of a city."""
    return {"city": city, "sun": [True] * days}


async def slow_weather(city: str) -> str:
    """Forecasts the weather of a city."""
    await asyncio.sleep(0)
    return f"sun in {city}"


def promised(city: str) -> Any:
    """Forecasts the weather of a city, later."""
    return asyncio.get_running_loop().create_future()


def conversation(*replies: Any) -> Server:
    left = iter(replies)
    return Server(lambda *_: next(left))


@BOTH
async def test_functions_are_called_until_the_model_answers(is_async: bool):  # noqa: FBT001
    server = conversation(
        chat_reply(None, ("weather", '{"city": "Ulm", "days": 2}'), ("weather", '{"city": "Bonn"}')),
        chat_reply("Sun in both."),
    )
    done = await call(
        is_async,
        server,
        "run_tools",
        "How is it?",
        [weather],
        model="m",
        max_tokens=9,
        tool_choice="required",
    )
    assert (done.text, done.reply.finish_reason) == ("Sun in both.", "stop")
    first, second = server.bodies
    (tool,) = first["tools"]
    assert tool["function"]["name"] == "weather"
    assert tool["function"]["description"] == "Forecasts the weather of a city."
    parameters = tool["function"]["parameters"]
    assert (parameters["required"], parameters["properties"]["days"]["type"]) == (["city"], "integer")
    assert (first["tool_choice"], second["tool_choice"], second["max_tokens"]) == ("required", "auto", 9)
    roles = [message["role"] for message in second["messages"]]
    assert roles == ["user", "assistant", "tool", "tool"]
    assert second["messages"][1]["tool_calls"][0]["id"] == second["messages"][2]["tool_call_id"] == "c0"
    assert orjson.loads(second["messages"][2]["content"]) == weather("Ulm", 2)
    assert orjson.loads(second["messages"][3]["content"]) == weather("Bonn")
    assert [*done.messages] == [*second["messages"], {"role": "assistant", "content": "Sun in both."}]


@BOTH
@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("wether", "{}", "there is no function 'wether'; choose from weather"),
        ("weather", '{"town": "Ulm"}', "city: Field required; town: Extra inputs are not permitted"),
        ("weather", '{"city": 7}', "city: Input should be a valid string"),
        ("weather", "{city", "Invalid JSON"),
        ("weather", "", "city: Field required"),
    ],
)
async def test_the_model_is_told_of_an_invalid_call(is_async: bool, name: str, arguments: str, told: str):  # noqa: FBT001
    server = conversation(chat_reply(None, (name, arguments)), chat_reply("Sorry."))
    assert (await call(is_async, server, "run_tools", "?", [weather], model="m")).text == "Sorry."
    assert told in server.bodies[1]["messages"][-1]["content"]


@BOTH
async def test_the_turns_are_bounded(is_async: bool):  # noqa: FBT001
    server = Server(lambda *_: chat_reply(None, ("weather", '{"city": "Ulm"}')))
    with pytest.raises(sdk.TooManyTurns, match="max_turns=3") as caught:
        await call(is_async, server, "run_tools", "?", [weather], model="m", max_turns=3)
    assert len(server.requests) == 3
    assert len(caught.value.messages) == 7
    with pytest.raises(ValueError, match="max_turns=0"):
        await call(is_async, server, "run_tools", "?", [weather], model="m", max_turns=0)


@BOTH
async def test_an_exception_of_a_function_is_raised(is_async: bool):  # noqa: FBT001
    def broken() -> str:
        raise ZeroDivisionError

    server = Server(lambda *_: chat_reply(None, ("broken", "{}")))
    with pytest.raises(ZeroDivisionError):
        await call(is_async, server, "run_tools", "?", [broken], model="m")


async def test_asynchronous_functions_need_the_asyncio_client():
    called = chat_reply(None, ("slow_weather", '{"city": "Ulm"}'))
    server = conversation(called, chat_reply("Sun."))
    await call(True, server, "run_tools", "?", [slow_weather], model="m")
    assert server.bodies[1]["messages"][-1]["content"] == "sun in Ulm"
    called["choices"][0]["message"]["tool_calls"][0]["function"]["name"] = "promised"
    with pytest.raises(TypeError, match="use AsyncTandem"):
        await call(False, conversation(called), "run_tools", "?", [promised], model="m")


@BOTH
async def test_functions_that_cannot_be_described_are_refused(is_async: bool):  # noqa: FBT001
    def bare(city) -> str:
        return city

    def star(*cities: str) -> str:
        return cities[0]

    server = Server(lambda *_: chat_reply("ok"))
    for functions, problem in (([bare], "has no annotation"), ([star], "arguments by name")):
        with pytest.raises(TypeError, match=problem):
            await call(is_async, server, "run_tools", "?", functions, model="m")
    with pytest.raises(ValueError, match="two functions"):
        await call(is_async, server, "run_tools", "?", [weather, weather], model="m")
    assert server.requests == []


# --- retrieval -----------------------------------------------------------------------------------

PASSAGES = ["one", "two", "three"]


def rag(path: str, body: Any) -> Any:
    if path == "/v1/embeddings":
        return vectors([[1, 0]])
    if path == "/v1/rerank":
        order = [{"index": at, "relevance_score": -at} for at in (2, 0)]
        return {"results": order[: body["top_n"]]}
    return chat_reply("It is so.")


@BOTH
async def test_answer_runs_all_stages_under_one_deadline(is_async: bool):  # noqa: FBT001
    asked: list[Any] = []

    def retrieve(vector: Any) -> list[str]:
        asked.append(vector)
        return PASSAGES

    server = Server(rag)
    with sdk.deadline(ms=60_000):
        found = await call(
            is_async, server, "answer", "Why?", retrieve=retrieve, model="m", embedding_model="e",
            rerank_model="r", top_n=2, prompt_name="query", service_class="gold", max_tokens=9,
        )  # fmt: skip
    assert (found.text, found.passages) == ("It is so.", ["three", "one"])
    assert list(found.stage_ms) == ["embed", "retrieve", "rerank", "chat"]
    assert all(ms > 0 for ms in found.stage_ms.values())
    np.testing.assert_array_equal(asked, [[1, 0]])
    embedded, ranked, chatted = server.bodies
    assert (embedded["input"], embedded["prompt_name"], embedded["service_class"]) == (
        "Why?",
        "query",
        "gold",
    )
    assert (ranked["documents"], ranked["top_n"], ranked["service_class"]) == (PASSAGES, 2, "gold")
    assert "max_tokens" not in embedded and chatted["max_tokens"] == 9
    assert "[1] three\n\n[2] one\n\nQuestion: Why?" in chatted["messages"][1]["content"]
    remaining = [float(request.headers["x-slo-e2e-ms"]) for request in server.requests]
    # Embedding and reranking state 5 and 26 % of what remains, and leave the rest to the chat.
    assert 3_000 >= remaining[0] > 2_500 and 15_790 >= remaining[1] > 15_000
    assert 60_000 >= remaining[2] > 55_000


@BOTH
async def test_answer_without_a_reranker_takes_the_first_passages(is_async: bool):  # noqa: FBT001
    server = Server(rag)
    found = await call(
        is_async,
        server,
        "answer",
        "Why?",
        retrieve=lambda _: PASSAGES,
        model="m",
        embedding_model="e",
        top_n=1,
    )
    assert (found.passages, list(found.stage_ms)) == (["one"], ["embed", "retrieve", "chat"])
    assert [request.url.path for request in server.requests] == ["/v1/embeddings", "/v1/chat/completions"]


async def test_the_server_answers_with_a_reranker():
    async with staged() as stage, listening(stage.app) as url, sdk.AsyncTandem(url) as tandem:
        with sdk.deadline(ms=60_000):
            found = await tandem.answer(
                "Why?", retrieve=lambda _: PASSAGES, model=CHAT_MODEL, embedding_model=EMBED_MODEL,
                rerank_model=RERANK_MODEL, top_n=2,
            )  # fmt: skip
        ranked = await tandem.rerank("Why?", PASSAGES, model=RERANK_MODEL, top_n=2)
    assert found.text == TEXT
    assert found.passages == [PASSAGES[row.index] for row in ranked.results]
    assert list(found.stage_ms) == ["embed", "retrieve", "rerank", "chat"]


async def test_a_retrieval_that_outlives_the_deadline_ends(clock: list[float]):
    def retrieve(_: Any) -> Any:
        clock[0] += 59.99
        return asyncio.Event().wait()

    server = Server(rag)
    with sdk.deadline(ms=60_000), pytest.raises(sdk.DeadlineExceeded):
        await call(True, server, "answer", "Why?", retrieve=retrieve, model="m", embedding_model="e")
    assert len(server.requests) == 1
