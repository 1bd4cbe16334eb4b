"""/v2/chat, /v2/embed and tokenization through Cohere's unmodified client; events and refusals."""

from base64 import b64decode
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import cohere
import numpy as np
import pytest

from controlplane.api.cohere import CohereEncoder
from controlplane.api.openai.buffered import UsageCounter
from controlplane.api.openai.chat import ShownParts
from controlplane.api.settings import ApiSettings, BodyLimits
from controlplane.core.generation import Delta
from tests.controlplane.api.example_bodies import CALLING, CALLS, HI, SECRET, conversation
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    HELLO,
    TEXT,
    Stage,
    listening,
    staged,
)

CHAT, EMBED, TOKENIZE, DETOKENIZE = "/v2/chat", "/v2/embed", "/v1/tokenize", "/v1/detokenize"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": CHAT_MODEL, "max_tokens": 20, "messages": HI} | fields


def embed(**fields: Any) -> dict[str, Any]:
    return {"model": EMBED_MODEL, "texts": ["a", "bc"]} | fields


@pytest.fixture
async def client(locked: Stage) -> AsyncIterator[cohere.AsyncClientV2]:
    async with (
        listening(locked.app) as url,
        cohere.AsyncClientV2(api_key=SECRET, base_url=url, max_retries=0) as client,
    ):
        yield client


async def test_chat(client: cohere.AsyncClientV2, locked: Stage):
    locked.generator.default = replace(HELLO, cached_tokens=2)
    answer = await client.chat(**asked())
    [part] = answer.message.content
    assert (part.type, part.text, answer.finish_reason) == ("text", TEXT, "COMPLETE")
    tokens, billed = answer.usage.tokens, answer.usage.billed_units
    assert (tokens.input_tokens, tokens.output_tokens, answer.usage.cached_tokens) == (2, 3, 2)
    assert (billed.input_tokens, billed.output_tokens) == (2, 3)
    assert answer.message.tool_calls is None and answer.logprobs is None


async def test_stream_has_what_the_whole_answer_has(client: cohere.AsyncClientV2, locked: Stage):
    locked.generator.default = CALLING
    events = [event async for event in client.chat_stream(**asked(tools=[ADD]))]
    content = ("content-start", "content-delta", "content-delta", "content-end")
    call = ("tool-call-start", "tool-call-delta", "tool-call-end")
    assert [event.type for event in events] == [
        *("message-start", "tool-plan-delta", *content),
        *(call[0], call[1], *call[1:], *call, "message-end"),
    ]
    assert [event.index for event in events if event.type == "tool-call-start"] == [0, 1]
    assert [event.index for event in events if event.type == "content-start"] == [0]
    parts = [event.delta.message.content.text for event in events if event.type == "content-delta"]
    arguments = "".join(
        event.delta.message.tool_calls.function.arguments
        for event in events
        if event.type == "tool-call-delta"
    )
    assert (parts, arguments) == (["Sure", "."], '{"a": 1}{}')
    whole = await client.chat(**asked(tools=[ADD]))
    message = whole.message
    assert [part.text for part in message.content] == ["Sure."]
    assert [call.function.arguments for call in message.tool_calls] == ['{"a": 1}', "{}"]
    assert message.tool_plan == events[1].delta.message.tool_plan == "Hm"
    last = events[-1].delta
    assert whole.finish_reason == last.finish_reason == "TOOL_CALL"
    assert last.usage.tokens.output_tokens == whole.usage.tokens.output_tokens == 3


async def test_reasoning_without_tools_is_a_part_of_the_content(client: cohere.AsyncClientV2, locked: Stage):
    locked.generator.default = replace(CALLING, tool_calls=())
    answer = await client.chat(**asked())
    assert [part.type for part in answer.message.content] == ["thinking", "text"]
    assert answer.message.content[0].thinking == "Hm" and answer.message.tool_plan is None
    events = [event async for event in client.chat_stream(**asked())]
    deltas = [event.delta.message.content for event in events if event.type == "content-delta"]
    assert [(delta.thinking, delta.text) for delta in deltas] == [("Hm", None), (None, "Sure"), (None, ".")]
    assert [event.index for event in events if event.type == "content-end"] == [0, 1]


async def test_tool_loop(client: cohere.AsyncClientV2, locked: Stage):
    locked.generator.upcoming.append(CALLING)
    first = await client.chat(**asked(tools=[ADD]))
    calls = first.message.tool_calls
    result = [{"type": "document", "document": {"data": {"sum": 2}}}, {"type": "text", "text": "ok"}]
    history = [
        {"role": "system", "content": "Add."},
        *HI,
        {"role": "assistant", "tool_calls": calls, "tool_plan": first.message.tool_plan},
        *({"role": "tool", "tool_call_id": call.id, "content": result} for call in calls),
    ]
    second = await client.chat(**asked(messages=history, tools=[ADD]))
    assert second.finish_reason == "COMPLETE"

    def text(*values: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": value} for value in values]

    chat, _ = conversation(locked)
    *_, answered, one, two = chat.messages
    assert chat.messages[0] == {"role": "system", "content": text("Add.")}
    assert (answered["reasoning"], answered["content"]) == ("Hm", None)
    assert [call["function"]["arguments"] for call in answered["tool_calls"]] == ['{"a": 1}', "{}"]
    assert one == {"role": "tool", "tool_call_id": "call_1", "content": text('{"sum":2}', "ok")}
    assert two["tool_call_id"] == "call_2" and chat.tools == [ADD]


async def test_options_become_those_of_chat(client: cohere.AsyncClientV2, locked: Stage):
    await client.chat(
        **asked(p=0.9, k=7, temperature=0.5, seed=3, stop_sequences=["END"], strict_tools=True, tools=[ADD]),
        frequency_penalty=0.25,
        presence_penalty=0.5,
        thinking={"type": "disabled"},
        citation_options={"mode": "OFF"},
        safety_mode="OFF",
        priority=0,
        response_format={"type": "json_object", "json_schema": SCHEMA},
        request_options={"additional_headers": {"x-service-class": "standard"}},
    )
    chat, sampling = conversation(locked)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.25, 0.5)
    assert (sampling.stop, sampling.max_tokens) == (("END",), 20)
    assert sampling.structure == {"type": "json_schema", "schema": SCHEMA}
    assert chat.template_options == {"enable_thinking": False}
    assert chat.tools[0]["function"]["strict"] is True and chat.tool_choice == "auto"


@pytest.mark.parametrize(("choice", "expected"), [("REQUIRED", "required"), ("NONE", "none")])
async def test_tool_choice(client: cohere.AsyncClientV2, locked: Stage, choice: str, expected: str):
    await client.chat(**asked(tools=[ADD], tool_choice=choice))
    assert conversation(locked)[0].tool_choice == expected


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        ({"type": "json_object", "schema": SCHEMA}, {"type": "json_schema", "schema": SCHEMA}),
    ],
)
async def test_response_format(stage: Stage, form: dict[str, Any], expected: object):
    assert (await stage.http.post(CHAT, json=asked(response_format=form))).status_code == 200
    assert conversation(stage)[1].structure == expected


async def test_finish_reasons(client: cohere.AsyncClientV2, locked: Stage):
    assert (await client.chat(**asked(max_tokens=2))).finish_reason == "MAX_TOKENS"
    shown = ShownParts(has_logprobs=False, is_single_call=False, hides_reasoning=False)
    for calls, reason in (((), "STOP_SEQUENCE"), (CALLS[:1], "STOP_SEQUENCE"), (CALLS, "TOOL_CALL")):
        encoder = CohereEncoder("id", shown, UsageCounter(1, n=1), has_plan=False)
        encoder.encode(Delta(0, "a", (1,), finish_reason="stop", stop_reason="END", tool_calls=calls))
        assert f'"finish_reason":"{reason}"'.encode() in encoder.end()


async def test_logprobs(client: cohere.AsyncClientV2):
    answer = await client.chat(**asked(logprobs=True))
    assert "".join(each.text for each in answer.logprobs) == TEXT
    assert [(each.token_ids, each.logprobs) for each in answer.logprobs] == [([n], [-0.5]) for n in (1, 2, 3)]
    events = [event async for event in client.chat_stream(**asked(logprobs=True))]
    streamed = [event.logprobs for event in events if event.type == "content-delta"]
    assert streamed == answer.logprobs


async def test_stream_that_fails_ends_with_the_error(client: cohere.AsyncClientV2, locked: Stage):
    locked.generator.default = replace(HELLO, request_fails_after=2)
    *_, last = [event async for event in client.chat_stream(**asked())]
    assert (last.type, last.delta.finish_reason) == ("message-end", "ERROR")
    assert "the model's engine failed" in last.delta.error


async def test_embed(client: cohere.AsyncClientV2, locked: Stage):
    answer = await client.embed(
        **embed(), input_type="search_document", embedding_types=["float", "base64"], output_dimension=4
    )
    rows = answer.embeddings.float_
    packed = [np.frombuffer(b64decode(row), "<f4") for row in answer.embeddings.base64]
    assert np.array_equal(np.float32(rows), packed) and np.shape(rows) == (2, 4)
    assert (answer.texts, answer.meta.billed_units.input_tokens) == (["a", "bc"], 3)
    same = await locked.http.post(
        "/v1/embeddings",
        json={"model": EMBED_MODEL, "input": ["a", "bc"], "dimensions": 4},
        headers={"authorization": f"Bearer {SECRET}"},
    )
    assert [row["embedding"] for row in same.json()["data"]] == rows
    plain = (
        await locked.http.post(EMBED, json=embed(), headers={"authorization": f"Bearer {SECRET}"})
    ).json()
    assert plain["embeddings"].keys() == {"float"} and np.shape(plain["embeddings"]["float"]) == (2, 8)


async def test_input_type_selects_the_models_prompt(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    used: list[str | None] = []
    tokenize = stage.embedder.tokenize

    async def observed(texts: list[str], *, prompt: str | None = None) -> list[list[int]]:
        used.append(prompt)
        return await tokenize(texts)

    monkeypatch.setattr(stage.embedder, "tokenize", observed)
    monkeypatch.setattr(stage.embedder, "prompts", {"query": "q: ", "passage": "p: "})
    for kind in ("search_query", "search_document", "clustering", None):
        answer = await stage.http.post(EMBED, json=embed(input_type=kind))
        assert answer.status_code == 200, answer.text
    assert used == ["query", "passage", None, None]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "0" * 64),
        ({"truncate": "END", "max_tokens": 3}, "000"),
        ({"truncate": "START", "max_tokens": 3}, "001"),
    ],
)
async def test_truncation(stage: Stage, fields: dict[str, Any], expected: str):
    answer = await stage.http.post(EMBED, json=embed(texts=["0" * 99 + "1"]) | fields)
    assert answer.status_code == 200, answer.text
    assert bytes(stage.embedder.runs[-1].inputs[0]).decode() == expected


async def test_tokens_and_models(client: cohere.AsyncClientV2):
    # The client looks for a tokenizer to download first; the model states none.
    found = await client.tokenize(text="hi", model=CHAT_MODEL)
    assert (found.tokens, found.token_strings) == ([104, 105], ["h", "i"])
    assert (await client.detokenize(tokens=found.tokens, model=CHAT_MODEL)).text == "hi"
    listed = (await client.models.list()).models
    assert {model.name: model.endpoints for model in listed}[EMBED_MODEL] == ["embed"]
    assert [model.name for model in (await client.models.list(endpoint="chat")).models] == [CHAT_MODEL]
    assert (await client.models.get(CHAT_MODEL)).context_length == 256
    with pytest.raises(cohere.NotFoundError, match="nobody"):
        await client.models.get("nobody")


async def test_errors_have_coheres_shape(client: cohere.AsyncClientV2, locked: Stage):
    with pytest.raises(cohere.NotFoundError) as missing:
        await client.chat(**asked(model="nobody"))
    assert missing.value.body["message"] == missing.value.body["error"]["message"]
    locked.generator.upcoming.append(replace(HELLO, engine_fails_after=0))
    with pytest.raises(cohere.ServiceUnavailableError):
        await client.chat(**asked())
    wrong = await locked.http.post(EMBED, json=embed(), headers={"authorization": "Bearer wrong"})
    assert (wrong.status_code, "unknown API key" in wrong.json()["message"]) == (401, True)


async def test_errors_outside_the_endpoint_have_the_same_shape():
    async with staged(ApiSettings(limits=BodyLimits(max_body=1_000))) as stage:
        large = await stage.http.post(CHAT, content=b"x" * 2_000)
        assert (large.status_code, "max_body" in large.json()["message"]) == (413, True)
        assert (await stage.http.get(CHAT)).json()["message"].startswith("method not allowed")
        assert "message" not in (await stage.http.get("/v1/chat/completions")).json()


def said(role: str = "user", *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return asked(messages=[{"role": role, "content": [*parts]} | fields])


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
ENDLESS = {"$ref": "#"}
DIGITS = 2**70
REFUSED = [
    (CHAT, {"model": CHAT_MODEL}, "messages", "add it"),
    (CHAT, asked(messages=[]), "messages", "at least 1 item"),
    (CHAT, asked(max_tokens=0), "max_tokens", "greater than or equal to 1"),
    (CHAT, asked(max_tokens=255), "messages", "lower max_tokens"),
    (CHAT, asked(documents=["a"]), "documents", "citations are not generated"),
    (CHAT, asked(citation_options={"mode": "FAST"}), "citation_options.mode", '"OFF"'),
    (CHAT, asked(safety_mode="STRICT"), "safety_mode", "system message"),
    (CHAT, asked(priority=1), "priority", "service_class"),
    (CHAT, asked(n=2), "n", "unknown field"),
    (CHAT, asked(tool_choice="REQUIRED"), "tool_choice", "tools is empty"),
    (CHAT, asked(tool_choice="auto", tools=[ADD]), "tool_choice", "'REQUIRED'"),
    (CHAT, asked(thinking={"type": "enabled", "token_budget": 0}), "thinking.token_budget", "greater"),
    (
        CHAT,
        asked(response_format={"type": "text", "json_schema": SCHEMA}),
        "response_format.json_schema",
        "json_object",
    ),
    (
        CHAT,
        asked(response_format={"type": "json_object", "json_schema": ENDLESS}),
        "response_format.json_schema",
        "refers back to itself",
    ),
    (
        CHAT,
        asked(response_format={"type": "json_object", "schema": ENDLESS}),
        "response_format.schema",
        "refers back to itself",
    ),
    (CHAT, said("user", IMAGE), "messages[0].content[0]", "only text is passed on to chat-model"),
    (CHAT, said("user", {"type": "audio"}), "messages[0].content[0].type", "not passed on to the model"),
    (CHAT, said("user", {"type": "thinking", "thinking": "a"}), "messages[0].content[0].type", "role user"),
    (CHAT, said("user", {"type": "text"}), "messages[0].content[0].text", "add it"),
    (CHAT, said("user"), "messages[0].content", "add it"),
    (CHAT, said("tool", {"type": "text", "text": "a"}), "messages[0].tool_call_id", "add it"),
    (
        CHAT,
        said("tool", {"type": "document", "document": {"data": {"a": DIGITS}}}, tool_call_id="c"),
        "messages",
        "64 bits",
    ),
    (CHAT, said("robot", {"type": "text", "text": "a"}), "messages[0].role", "'system'"),
    (EMBED, embed(texts=[]), "texts", "at least 1 item"),
    (EMBED, embed(texts=["a", ""]), "texts[1]", "at least 1 character"),
    (EMBED, embed(texts=["a"] * 2049), "texts", "at most 2048 items"),
    (EMBED, embed(texts=["a", "x" * 99], truncate="NONE"), "texts", "texts[1] has 99 characters"),
    (EMBED, embed(truncate="NONE", max_tokens=4), "max_tokens", "leave one of them out"),
    (EMBED, embed(max_tokens=65), "max_tokens", "at most 64"),
    (EMBED, embed(embedding_types=["float", "int8"]), "embedding_types[1]", "not quantized"),
    (EMBED, embed(embedding_types=[]), "embedding_types", "at least 1 item"),
    (EMBED, embed(output_dimension=5), "output_dimension", "supports 4, 8"),
    (EMBED, embed(input_type="image"), "input_type", "'search_document'"),
    (EMBED, embed(images=["data:"]), "images", "only text is embedded"),
    (EMBED, embed(inputs=[]), "inputs", "send texts"),
    (EMBED, embed(model=CHAT_MODEL), "model", "does not serve embeddings"),
    (TOKENIZE, {"model": CHAT_MODEL, "text": ""}, "text", "at least 1 character"),
    (TOKENIZE, {"model": CHAT_MODEL, "text": "x" * 9_000}, "text", "characters"),
    (DETOKENIZE, {"model": CHAT_MODEL, "tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
    (DETOKENIZE, {"model": CHAT_MODEL, "tokens": [10**6]}, "tokens", "1000000"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), REFUSED)
async def test_refusal_names_field_rule_and_remedy(
    stage: Stage, path: str, body: dict[str, Any], param: str, message: str
):
    # httpx writes integers beyond 64 bits, too.
    answer = await stage.http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], answer.json()["message"]) == (400, param, error["message"])
    assert message in error["message"], error
    assert not stage.generator.runs and not stage.embedder.runs
