"""/tokenize and /detokenize in vLLM's shapes; counts equal the usage of the same request."""

import asyncio
from typing import Any

import pytest

from controlplane.core.generation import ChatPrompt
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage, staged

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


async def test_a_prompt(stage: Stage):
    answer = await stage.http.post("/tokenize", json={"model": CHAT_MODEL, "prompt": "hé"})
    assert answer.json() == {"count": 3, "max_model_len": 256, "tokens": [104, 195, 169], "token_strs": None}
    ask = {"model": CHAT_MODEL, "prompt": "hé", "max_tokens": 1}
    used = (await stage.http.post("/v1/completions", json=ask)).json()["usage"]
    assert used["prompt_tokens"] == 3


async def test_a_conversation(stage: Stage):
    found = (await stage.http.post("/tokenize", json={"messages": HI, "return_token_strs": True})).json()
    used = (await stage.http.post("/v1/chat/completions", json={"model": CHAT_MODEL, "messages": HI})).json()
    assert found["count"] == used["usage"]["prompt_tokens"] == len(found["tokens"])
    assert "".join(found["token_strs"]) == "hihello"
    assert len(stage.generator.runs) == 1


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
OPTIONS: list[dict[str, Any]] = [
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "required"},
    {"chat_template_kwargs": {"style": "brief"}},
    {"reasoning_effort": "low", "add_generation_prompt": True},
    {"continue_final_message": True},
    {"add_special_tokens": True},
    {"chat_template": None, "media_io_kwargs": None, "mm_processor_kwargs": None},
]


@pytest.mark.parametrize("fields", OPTIONS)
async def test_the_count_is_the_usage_of_the_same_chat(stage: Stage, monkeypatch, fields: dict[str, Any]):
    async def whole(prompt: ChatPrompt) -> list[int]:
        return list(repr((prompt.tools, prompt.template_options, prompt.add_special_tokens)).encode())

    monkeypatch.setattr(stage.generator, "render_chat", whole)
    stage.generator.max_model_tokens = 1_000
    plain = (await stage.http.post("/tokenize", json={"messages": HI})).json()["count"]
    body = {"messages": HI, "max_tokens": 1} | fields
    counted = await stage.http.post("/tokenize", json={"messages": HI} | fields)
    answer = await stage.http.post("/v1/chat/completions", json=body | {"model": CHAT_MODEL})
    assert answer.status_code == counted.status_code == 200, (answer.text, counted.text)
    assert counted.json()["count"] == answer.json()["usage"]["prompt_tokens"]
    assert (counted.json()["count"] != plain) == any(fields.values())


async def test_tokens_become_the_text_again(stage: Stage):
    tokens = (await stage.http.post("/tokenize", json={"prompt": "wörld"})).json()["tokens"]
    answer = await stage.http.post("/detokenize", json={"model": CHAT_MODEL, "tokens": tokens})
    assert answer.json() == {"prompt": "wörld"}
    assert (await stage.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_long_text_is_tokenized_beside_the_event_loop(stage: Stage, monkeypatch):
    """Also one that exceeds the context, as clients count to find out."""
    threads, run = [], asyncio.to_thread

    async def to_thread(*given: Any) -> Any:
        threads.append(given)
        return await run(*given)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    stage.generator.max_token_characters = 100
    answer = await stage.http.post("/tokenize", json={"prompt": "x" * 5_000, "return_token_strs": True})
    assert (answer.json()["count"], answer.json()["max_model_len"]) == (5_000, 256)
    assert len(threads) == 2
    tokens = answer.json()["tokens"]
    assert (await stage.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"] == "x" * 5_000
    assert len(threads) == 3


async def test_more_tokens_than_an_answer_may_have_are_refused():
    """Those of a prompt of the model never are; its context has 256."""
    async with staged(server={"limits": {"max_answer_values": 300}}) as stage:
        stage.generator.max_token_characters = 100
        for tokens, status in ((256, 200), (300, 200), (301, 400)):
            bodies = {"/tokenize": {"prompt": "x" * tokens}, "/detokenize": {"tokens": [9] * tokens}}
            for path, given in bodies.items():
                answer = await stage.http.post(path, json=given)
                assert answer.status_code == status, answer.text
                assert status == 200 or answer.json()["error"]["code"] == "answer_too_large"
    async with staged(server={"limits": {"max_answer_values": 10}}) as stage:
        assert (await stage.http.post("/tokenize", json={"prompt": "x" * 256})).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param", "code", "message"),
    [
        ("/tokenize", {}, "prompt", "invalid_value", "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt", "invalid_value", "either prompt or"),
        ("/tokenize", {"prompt": "x" * 300}, "prompt", "context_length_exceeded", "has 300 characters"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, "chat_template", "unsupported_parameter",
         "the operator chooses the template"),
        ("/tokenize", {"messages": HI, "media_io_kwargs": {}}, "media_io_kwargs", "unsupported_parameter",
         "how images are read"),
        ("/tokenize", {"messages": HI, "mm_processor_kwargs": {}}, "mm_processor_kwargs",
         "unsupported_parameter", "how images are read"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools", "invalid_value", "a request with messages"),
        ("/tokenize", {"prompt": "a", "model": EMBED_MODEL}, "model", "invalid_value",
         "does not serve tokenization; models that do: chat-model"),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, "model", "model_not_found", "does not exist"),
        ("/tokenize", {"prompt": "a", "wish": 1}, "wish", "unknown_parameter", "unknown field"),
        ("/detokenize", {"tokens": [1, 256]}, "tokens", "invalid_value", "has the id 256; the highest"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]", "invalid_value", "greater than or equal to 0"),
        ("/detokenize", {}, "tokens", "missing_required_parameter", "missing; add it"),
    ],
)  # fmt: skip
async def test_bad_input_names_field_rule_and_remedy(stage, path, fields, param, code, message):
    answer = await stage.http.post(path, json=fields)
    error = answer.json()["error"]
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert (error["param"], error["code"]) == (param, code)
    assert message in error["message"]
