"""Invalid requests: every error names the field, the value and the rule, and no lease remains."""

import asyncio
import gzip
import hashlib
from typing import Any

import httpx
import orjson
import pytest

from backends.testing.scripted import Script
from controlplane.api.settings import ApiSettings, BodyLimits
from tests.controlplane.api.example_bodies import CHAT, EMBED, HI, TEXT, api_key, chat, embed, text
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage, listening, staged

_ENDLESS = {"$ref": "#"}


def said(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "hi"} | fields])


# path, body, status, param, code
BODIES = [
    (CHAT, b'{"model": ', 400, None, "invalid_json"),
    (CHAT, b"", 400, None, "invalid_json"),
    (CHAT, b'\xff\xfe{"model"', 400, None, "invalid_json"),
    (CHAT, b"[]", 400, None, "invalid_json"),
    (CHAT, b"null", 400, None, "invalid_json"),
    (CHAT, b'{"model":"x","messages":[{"role":"user","content":"\\ud800"}]}', 400, None, "invalid_json"),
    (CHAT, b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, None, "body_too_complex"),
    (CHAT, {}, 400, "model", "missing_required_parameter"),
    (CHAT, chat(max_tokns=3), 400, "max_tokns", "unknown_parameter"),
    (CHAT, chat(best_of=2), 400, "best_of", "unsupported_parameter"),
    (CHAT, chat(functions=[]), 400, "functions", "unsupported_parameter"),
    (CHAT, chat(vllm_xargs={}), 400, "vllm_xargs", "unsupported_parameter"),
    (CHAT, chat(priority=1), 400, "priority", "unsupported_parameter"),
    (CHAT, chat(top_k=2**63), 400, "top_k", "invalid_value"),
    (CHAT, chat(messages=[]), 400, "messages", "invalid_value"),
    (CHAT, chat(messages="hi"), 400, "messages", "invalid_value"),
    (CHAT, said(role="robot"), 400, "messages[0].role", "invalid_value"),
    (CHAT, said(content=None), 400, "messages[0].content", "invalid_value"),
    (
        CHAT,
        said(content=[{"type": "image_url", "image_url": {}}]),
        400,
        "messages[0].content",
        "invalid_value",
    ),
    (CHAT, said(mood="good"), 400, "messages[0].mood", "unknown_parameter"),
    (CHAT, chat(temperature=2.1), 400, "temperature", "invalid_value"),
    (CHAT, chat(temperature="1"), 400, "temperature", "invalid_value"),
    (CHAT, b'{"model":"chat-model","messages":[],"temperature":NaN}', 400, "temperature", "invalid_value"),
    (CHAT, chat(top_p=0), 400, "top_p", "invalid_value"),
    (CHAT, chat(n=0), 400, "n", "invalid_value"),
    (CHAT, chat(n=True), 400, "n", "invalid_value"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "invalid_value"),
    (CHAT, chat(max_tokens=4, max_completion_tokens=5), 400, "max_tokens", "invalid_value"),
    (CHAT, chat(presence_penalty=-3), 400, "presence_penalty", "invalid_value"),
    (CHAT, chat(logit_bias={"7": 101}), 400, "logit_bias.7", "invalid_value"),
    (CHAT, chat(logit_bias={"x": 1}), 400, "logit_bias.x", "invalid_value"),
    (CHAT, chat(seed=2**63), 400, "seed", "invalid_value"),
    (CHAT, chat(seed=2**63 - 1, n=2), 400, "seed", "invalid_value"),
    (TEXT, text(stop_token_ids=list(range(65))), 400, "stop_token_ids", "invalid_value"),
    (CHAT, chat(stop=["x"] * 17), 400, "stop", "invalid_value"),
    (CHAT, chat(stop=""), 400, "stop", "invalid_value"),
    (CHAT, chat(top_logprobs=3), 400, "top_logprobs", "invalid_value"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", "invalid_value"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice", "invalid_value"),
    (CHAT, chat(tools=[{"type": "web"}]), 400, "tools[0].type", "invalid_value"),
    (CHAT, chat(response_format={"type": "yaml"}), 400, "response_format.type", "invalid_value"),
    (
        CHAT,
        chat(response_format={"type": "json_schema"}),
        400,
        "response_format.json_schema",
        "invalid_value",
    ),
    (
        CHAT,
        chat(structured_outputs={"regex": "a", "grammar": "b"}),
        400,
        "structured_outputs",
        "invalid_value",
    ),
    (CHAT, chat(structured_outputs={"json": "{"}), 400, "structured_outputs.json", "invalid_value"),
    (CHAT, chat(structured_outputs={"json": "[1]"}), 400, "structured_outputs.json", "invalid_value"),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": _ENDLESS}}),
        400,
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    (CHAT, chat(structured_outputs={"json": _ENDLESS}), 400, "structured_outputs.json", "invalid_value"),
    (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": _ENDLESS}}]),
        400,
        "tools[0].function.parameters",
        "invalid_value",
    ),
    (TEXT, text(structured_outputs={"json": _ENDLESS}), 400, "structured_outputs.json", "invalid_value"),
    (CHAT, chat(service_tier="priority"), 400, "service_tier", "invalid_value"),
    (CHAT, chat(slo={"ttft_ms": 0}), 400, "slo.ttft_ms", "invalid_value"),
    (CHAT, chat(slo={"ttft_ms": 86_400_001}), 400, "slo.ttft_ms", "invalid_value"),
    (CHAT, chat(slo={"ttft": 5}), 400, "slo.ttft", "unknown_parameter"),
    (CHAT, chat(service_class="royal"), 400, "service_class", "unknown_service_class"),
    (CHAT, chat(model="nobody"), 404, "model", "model_not_found"),
    (CHAT, chat(model=EMBED_MODEL), 400, "model", "invalid_value"),
    (CHAT, said(content="x" * 300), 400, "messages", "context_length_exceeded"),
    (CHAT, chat(max_tokens=255), 400, "messages", "context_length_exceeded"),
    (TEXT, text(max_tokens=4, max_completion_tokens=5), 400, "max_tokens", "invalid_value"),
    (TEXT, text(prompt=[]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=[[]]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=["a", 1]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=[-1]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=["a"] * 129), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=""), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=["fine", "x" * 300]), 400, "prompt", "context_length_exceeded"),
    (TEXT, text(suffix="x"), 400, "suffix", "unsupported_parameter"),
    (TEXT, text(best_of=2), 400, "best_of", "invalid_value"),
    (TEXT, text(max_tokens=0), 400, "max_tokens", "invalid_value"),
    (TEXT, text(prompt=[1, 256], echo=True), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt="x" * 65, echo=True, logprobs=1), 400, "echo", "invalid_value"),
    (TEXT, text(messages=HI), 400, "messages", "unknown_parameter"),
    (EMBED, embed(input=""), 400, "input", "invalid_value"),
    (EMBED, embed(input=[]), 400, "input", "invalid_value"),
    (EMBED, embed(input=["a", ""]), 400, "input", "invalid_value"),
    (EMBED, embed(input=[[]]), 400, "input", "invalid_value"),
    (EMBED, embed(input=["a"] * 2049), 400, "input", "invalid_value"),
    (EMBED, embed(input="x" * 65), 400, "input", "context_length_exceeded"),
    (EMBED, embed(dimensions=5), 400, "dimensions", "invalid_value"),
    (EMBED, embed(dimensions=0), 400, "dimensions", "invalid_value"),
    (EMBED, embed(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens", "invalid_value"),
    (EMBED, embed(truncate_prompt_tokens=-2), 400, "truncate_prompt_tokens", "invalid_value"),
    (EMBED, embed(truncate_prompt_tokens=65), 400, "truncate_prompt_tokens", "invalid_value"),
    (EMBED, embed(truncate_prompt_tokens="all"), 400, "truncate_prompt_tokens", "invalid_value"),
    (EMBED, embed(truncation_side="left"), 400, "truncation_side", "invalid_value"),
    (EMBED, embed(encoding_format="hex"), 400, "encoding_format", "invalid_value"),
    (EMBED, embed(model=CHAT_MODEL), 400, "model", "invalid_value"),
    (EMBED, embed(model="nobody"), 404, "model", "model_not_found"),
    (EMBED, embed(stream=True), 400, "stream", "unknown_parameter"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "code"), BODIES)
async def test_body(
    stage: Stage, path: str, body: dict[str, Any] | bytes, status: int, param: str | None, code: str
):
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    answer = await stage.http.post(path, content=content)
    check_error(answer, status, param, code)
    assert not stage.generator.runs


@pytest.mark.parametrize("half", ["\\ud800", "\\ud800b", "\\udc00"])
async def test_unpaired_surrogate_is_named(stage: Stage, half: str):
    content = f'{{"model": "{EMBED_MODEL}", "input": "{half}"}}'
    answer = await stage.http.post(EMBED, content=content)
    check_error(answer, 400, None, "invalid_json")
    assert answer.json()["error"]["message"].endswith("pair is not a character; replace it)")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (chat(slo={"ttft": 5}), "slo.ttft: unknown field; did you mean slo.ttft_ms?"),
        (chat(slo={"mood": 1}), "slo.mood: unknown field; remove it"),
        (said(mood="good"), "messages[0].mood: unknown field; remove it"),
    ],
)
async def test_misspelt_field_gets_a_suggestion(stage: Stage, body: dict[str, Any], message: str):
    answer = await stage.http.post(CHAT, json=body)
    assert answer.json()["error"]["message"].endswith(message)


HEADERS = [
    ({"x-slo-ttft-ms": "fast"}, {}, "x-slo-ttft-ms"),
    ({"x-slo-ttft-ms": "0"}, {}, "x-slo-ttft-ms"),
    ({"x-slo-ttft-ms": "-5"}, {}, "x-slo-ttft-ms"),
    ({"x-slo-ttft-ms": "nan"}, {}, "x-slo-ttft-ms"),
    ({"x-slo-ttft-ms": "1e3"}, {}, "x-slo-ttft-ms"),
    ({"x-slo-ttft-ms": ""}, {}, "x-slo-ttft-ms"),
    ({"x-slo-tpot-ms": "1_0"}, {}, "x-slo-tpot-ms"),
    ({"x-slo-e2e-ms": "86400001"}, {}, "x-slo-e2e-ms"),
    ({"x-llm-d-slo-tpot-ms": "٣"}, {}, "x-llm-d-slo-tpot-ms"),
    ({"x-slo-ttft-ms": "100"}, {"slo": {"ttft_ms": 200}}, "slo.ttft_ms"),
    ({"x-slo-ttft-ms": "100", "x-llm-d-slo-ttft-ms": "200"}, {}, "x-slo-ttft-ms"),
    ({"x-service-class": "batch", "x-llm-d-inference-objective": "standard"}, {}, "x-service-class"),
    ({"x-service-class": "standard"}, {"service_class": "other"}, "service_class"),
    ({"x-request-id": "no spaces"}, {}, "x-request-id"),
    ({"x-request-id": "a/0"}, {}, "x-request-id"),
    ({"x-request-id": "x" * 129}, {}, "x-request-id"),
]


@pytest.mark.parametrize(("headers", "fields", "param"), HEADERS)
async def test_header(stage: Stage, headers: dict[str, str], fields: dict[str, Any], param: str):
    raw = {name: value.encode() for name, value in headers.items()}
    answer = await stage.http.post(CHAT, json=chat(**fields), headers=raw)
    check_error(answer, 400, param, "invalid_value")


async def test_class_named_by_header_is_checked_like_the_field(stage: Stage):
    answer = await stage.http.post(CHAT, json=chat(), headers={"x-service-class": "royal"})
    check_error(answer, 400, "service_class", "unknown_service_class")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("POST", "/v1/nope", 404, "not_found"),
        ("GET", "/v1/models/nobody", 404, "model_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/", 404, "model_not_found"),
    ],
)
async def test_path(stage: Stage, method: str, path: str, status: int, code: str):
    answer = await stage.http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_over_the_limit(is_chunked: bool):  # noqa: FBT001
    body = orjson.dumps(chat(messages=[{"role": "user", "content": "x" * 20_000}]))

    async def pieces():
        for start in range(0, len(body), 1_000):
            yield body[start : start + 1_000]

    async with (
        staged(ApiSettings(limits=BodyLimits(max_body=10_000))) as stage,
        listening(stage.app) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        answer = await http.post(CHAT, content=pieces() if is_chunked else body)
        check_error(answer, 413, None, "request_too_large")
        assert "10000" in answer.json()["error"]["message"]


async def test_declared_length_over_the_limit_is_refused_unread(stage: Stage):
    async with listening(stage.app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 413")
        writer.close()


@pytest.mark.parametrize("coding", ["gzip", "zstd, gzip", "x" * 4_000])
async def test_compressed_body_is_refused(stage: Stage, coding: str):
    packed = gzip.compress(orjson.dumps(chat()))
    answer = await stage.http.post(CHAT, content=packed, headers={"content-encoding": coding})
    check_error(answer, 415, "content-encoding", "unsupported_content_encoding")
    assert "send the body uncompressed" in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "identity"


async def test_identity_content_encoding_is_accepted(stage: Stage):
    answer = await stage.http.post(EMBED, json=embed(), headers={"content-encoding": "Identity"})
    assert answer.status_code == 200
    assert (await stage.http.get("/health", headers={"content-encoding": "gzip"})).status_code == 200


async def test_client_that_disconnects_within_its_body(stage: Stage):
    async with listening(stage.app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b'POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{"model"')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert await asyncio.wait_for(reader.read(), 5) == b""
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.post(EMBED, json=embed())).status_code == 200


LOCKED = ApiSettings(
    api_keys=(api_key("sesame", "red"), api_key("poppy", "blue", "standard")),
    admin_key_sha256=hashlib.sha256(b"root").hexdigest(),
)
OPEN = ("/version", "/health", "/ready", "/metrics")
CLASSES = {"standard": {"default": True, "sheddable": False}, "gold": {"priority": 5}}


@pytest.mark.parametrize(
    "stated", [None, "sesame", "Bearer ", "Bearer Sesame", "Basic sesame", b"Bearer \xff\xfe"]
)
async def test_wrong_key(stated: str | bytes | None):
    """Over every path but those that are open to all, before the body is read."""
    headers = {} if stated is None else {"authorization": stated}
    async with staged(LOCKED) as stage:
        described = (await stage.http.get("/openapi.json")).json()["paths"]
        operations = {(method, path) for path, each in described.items() for method in each}
        assert {("post", "/tokenize"), ("post", "/v2/chat"), ("post", "/v1/messages")} < operations
        for method, path in sorted(operations - {("get", path) for path in OPEN}):
            answer = await stage.http.request(method.upper(), path, headers=headers)
            assert answer.headers.get("www-authenticate") == "Bearer", (method, path)
            if path.startswith("/v1/messages"):
                assert (answer.status_code, answer.json()["type"]) == (401, "error")
            else:
                check_error(answer, 401, None, "invalid_api_key")


async def test_keys_select_the_tenant_and_its_classes():
    async with staged(LOCKED, classes=CLASSES) as stage:
        for secret, service_class, status in [
            ("sesame", "gold", 200),
            ("poppy", "standard", 200),
            ("poppy", "gold", 403),
        ]:
            answer = await stage.http.post(
                CHAT,
                json=chat(service_class=service_class),
                headers={"authorization": f"Bearer {secret}"},
            )
            assert answer.status_code == status, answer.text
        asked = [(run.request.tenant, run.request.service_class.name) for run in stage.generator.runs]
        assert asked == [("red", "gold"), ("blue", "standard")]
        check_error(answer, 403, "service_class", "service_class_not_allowed")


async def test_admin_needs_its_own_key_and_is_disabled_without_one(stage: Stage):
    check_error(await stage.http.get("/admin/state"), 403, None, "admin_disabled")
    async with staged(LOCKED) as locked:
        answer = await locked.http.get("/admin/state", headers={"authorization": "Bearer sesame"})
        check_error(answer, 401, None, "invalid_api_key")
        answer = await locked.http.get("/admin/state", headers={"authorization": "Bearer root"})
        assert set(answer.json()["owners"]) == {"llm", "embedding"}


async def test_refusal_by_the_engine_is_a_400(stage: Stage):
    stage.generator.default = Script(refusal="roles must alternate")
    check_error(await stage.http.post(CHAT, json=chat()), 400, None, "invalid_value")


async def test_unexpected_exception_is_a_500_without_details(stage: Stage):
    stage.service.metrics_text = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    answer = await stage.http.get("/metrics")
    check_error(answer, 500, None, "internal_error", kind="server_error")
    assert "division" not in answer.text


def check_error(
    answer: httpx.Response, status: int, param: str | None, code: str, *, kind: str | None = None
) -> None:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), answer.text
    kinds = {401: "authentication_error", 403: "permission_error"}
    assert error["type"] == (kind or kinds.get(status, "invalid_request_error"))
    assert param is None or param in error["message"] or code == "context_length_exceeded"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]


async def test_client_that_disconnects_mid_stream_aborts_its_request():
    async with (
        staged(is_stepped=True) as stage,
        listening(stage.app) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        asking = asyncio.create_task(
            http.send(http.build_request("POST", CHAT, json=chat(stream=True)), stream=True)
        )
        await stage.generator.until_runs(1)
        stage.generator.allow(1)
        answer = await asking
        assert b"Hello" in await anext(answer.aiter_bytes())
        assert not stage.is_clean()
        await answer.aclose()
        await asyncio.wait_for(stage.generator.runs[0].ended.wait(), 5)
        assert stage.generator.runs[0].end == "aborted"


async def test_an_objective_of_less_than_a_nanosecond_is_one_of_a_nanosecond(stage: Stage):
    headers = {"x-slo-ttft-ms": "0.0000001", "x-slo-e2e-ms": "1000"}
    answer = await stage.http.post(CHAT, json=chat(), headers=headers)
    assert (answer.status_code, stage.generator.runs[-1].request.slo.ttft) == (200, 1)
