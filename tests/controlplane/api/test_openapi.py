"""/openapi.json and /docs: each POST path has its bodies, and answers have only the members described."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from backends.testing.scripted import Script
from controlplane.api.openapi import model_schemas
from controlplane.api.protocol import answers, cohere_answers
from tests.controlplane.api.example_bodies import HI
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, HELLO, Stage, staged, until

CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCRIPT = Script(tokens=4, words=("a", "b"), reasoning_words=("Hm",), tool_calls=(CALL,), cached_tokens=1)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CHAT = {"model": CHAT_MODEL, "messages": HI, "logprobs": True, "top_logprobs": 1}
CHAT_OF_COHERE = {"model": CHAT_MODEL, "messages": HI}
TOOLS = [{"type": "function", "function": FUNCTION}]
ANSWERS: list[tuple[str, dict[str, Any], type[BaseModel]]] = [
    ("/v1/chat/completions", CHAT | {"tools": TOOLS}, answers.ChatCompletion),
    ("/v1/completions", {"model": CHAT_MODEL, "prompt": "hi", "logprobs": 1}, answers.TextCompletion),
    ("/v1/embeddings", {"model": EMBED_MODEL, "input": "hi"}, answers.EmbeddingList),
    (
        "/v1/responses",
        {
            "model": CHAT_MODEL,
            "input": "hi",
            "tools": [{"type": "function", **FUNCTION}],
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "metadata": {"a": "b"},
        },
        answers.ResponseObject,
    ),
    (
        "/v1/messages",
        {
            "model": CHAT_MODEL,
            "messages": HI,
            "max_tokens": 9,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        },
        answers.AnthropicMessage,
    ),
    ("/v2/chat", CHAT_OF_COHERE | {"logprobs": True}, cohere_answers.CohereChatResponse),
    ("/v2/chat", CHAT_OF_COHERE | {"tools": TOOLS}, cohere_answers.CohereChatResponse),
    (
        "/v2/embed",
        {"model": EMBED_MODEL, "texts": ["hi"], "embedding_types": ["float", "base64"]},
        cohere_answers.CohereEmbedResponse,
    ),
    ("/v1/tokenize", {"model": CHAT_MODEL, "text": "hi"}, cohere_answers.CohereTokens),
    ("/v1/detokenize", {"model": CHAT_MODEL, "tokens": [104]}, cohere_answers.CohereText),
    ("/v1/messages/count_tokens", {"model": CHAT_MODEL, "messages": HI}, answers.TokenCount),
    ("/v1/responses/input_tokens", {"model": CHAT_MODEL, "input": "hi"}, answers.InputTokenCount),
]


def unknown_members(value: Any, schema: dict[str, Any], defined: dict[str, Any], path: str = "") -> list[str]:
    """Members of `value` that its schema does not name."""
    if "$ref" in schema:
        return unknown_members(value, defined[schema["$ref"].rsplit("/", 1)[1]], defined, path)
    if "anyOf" in schema:
        return min((unknown_members(value, each, defined, path) for each in schema["anyOf"]), key=len)
    if isinstance(value, list):
        items = schema.get("items", {})
        return [
            name
            for at, each in enumerate(value)
            for name in unknown_members(each, items, defined, f"{path}[{at}]")
        ]
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    known = schema["properties"]
    found = [f"{path}.{name}" for name in value.keys() - known.keys()]
    for name in value.keys() & known.keys():
        found += unknown_members(value[name], known[name], defined, f"{path}.{name}")
    return found


@pytest.mark.parametrize(("path", "body", "model"), ANSWERS)
async def test_answers_are_described(stage: Stage, path: str, body: dict[str, Any], model: type[BaseModel]):
    stage.generator.default = SCRIPT if "tools" in body else replace(HELLO, cached_tokens=1)
    answer = await stage.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    model.model_validate_json(answer.content)
    schema = (await stage.http.get("/openapi.json")).json()
    described = schema["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert described == {"$ref": f"#/components/schemas/{model.__name__}"}
    assert unknown_members(answer.json(), described, schema["components"]["schemas"]) == []


ANTHROPIC = {"anthropic-version": "2023-06-01"}
COHERE = {"x-fern-sdk-name": "cohere-ai"}
MODEL, OF_MODEL = "/v1/models/{model_id}", f"/v1/models/{CHAT_MODEL}"
READ: list[tuple[str, str, dict[str, str], type[BaseModel]]] = [
    ("/v1/models", "/v1/models", {}, answers.ModelList),
    ("/v1/models", "/v1/models", ANTHROPIC, answers.AnthropicModelList),
    ("/v1/models", "/v1/models", COHERE, cohere_answers.CohereModelList),
    (MODEL, OF_MODEL, {}, answers.ModelEntry),
    (MODEL, OF_MODEL, COHERE, cohere_answers.CohereModel),
    (MODEL, OF_MODEL, ANTHROPIC, answers.AnthropicModel),
    ("/version", "/version", {}, answers.ServerVersion),
    ("/health", "/health", {}, answers.Liveness),
    ("/ready", "/ready", {}, answers.ReadyAnswer),
]


@pytest.mark.parametrize(("path", "asked", "headers", "model"), READ)
async def test_answers_of_get_requests_are_described(
    stage: Stage, path: str, asked: str, headers: dict[str, str], model: type[BaseModel]
):
    answer = await stage.http.get(asked, headers=headers)
    model.model_validate_json(answer.content)
    schema = (await stage.http.get("/openapi.json")).json()
    described = schema["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert {"$ref": f"#/components/schemas/{model.__name__}"} in described.get("anyOf", [described])
    assert unknown_members(answer.json(), described, schema["components"]["schemas"]) == []


async def test_each_path_describes_its_bodies_and_errors(stage: Stage):
    schema = (await stage.http.get("/openapi.json")).json()
    posts = {path: each["post"] for path, each in schema["paths"].items() if "post" in each}
    mapped = {path: post for path, post in posts.items() if not path.startswith("/admin")}
    assert {"/v1/responses", "/v1/messages", "/v2/chat", "/v1/rerank", "/tokenize"} <= mapped.keys()
    for path, post in mapped.items():
        assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"], path
        errors = post["responses"].keys() - {"200"}
        assert errors == {"400", "401", "403", "404", "408", "413", "415", "429", "431", "500", "503"}
        assert post["responses"]["200"]["content"]["application/json"]["schema"], path
    assert "text/event-stream" in mapped["/v1/messages"]["responses"]["200"]["content"]
    assert "text/event-stream" not in mapped["/v1/embeddings"]["responses"]["200"]["content"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_errors_are_described(stage: Stage, path: str):
    answer = await stage.http.post(path, json={})
    found = answers.ErrorResponse.model_validate_json(answer.content)
    assert (found.type, found.error.code) == (
        "error" if "messages" in path else None,
        "missing_required_parameter",
    )


async def test_every_status_has_the_error_object_and_its_headers(stage: Stage):
    schema = (await stage.http.get("/openapi.json")).json()
    for name, each in schema["components"]["responses"].items():
        body = each["content"]["application/json"]["schema"]
        assert body == {"$ref": "#/components/schemas/ErrorResponse"}, name
    described = schema["components"]["responses"]
    assert (
        "retry-after" in described["Error429"]["headers"]
        and "retry-after" in described["Error503"]["headers"]
    )
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert {"400", "408", "431", "500"} <= operation["responses"].keys(), path
            assert not {"422", "default"} & operation["responses"].keys(), path


async def test_docs_show_the_schema(stage: Stage):
    page = await stage.http.get("/docs")
    assert page.status_code == 200
    assert "/openapi.json" in page.text


async def test_the_schemas_of_bodies_are_built_before_they_are_asked_for() -> None:
    """On the event loop they would keep every other request for as long as they take."""
    model_schemas.cache_clear()
    async with staged():
        await until(lambda: model_schemas.cache_info().currsize == 1)


def test_validators_are_built_with_the_schemas_and_not_by_an_import():
    script = """
from controlplane.api.openapi import _BODIES, model_schemas
bodies = [body for body, _ in _BODIES.values()]
assert not any(body.__pydantic_complete__ for body in bodies)
model_schemas()
assert all(body.__pydantic_complete__ for body in bodies)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
