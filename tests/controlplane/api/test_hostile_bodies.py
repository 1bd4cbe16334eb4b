"""Bodies that are meant to exhaust the server: each is refused cheaply, with a short reply."""

import asyncio
import threading
from typing import Any

import httpx
import orjson
import pytest
from pydantic import BaseModel

from backends.testing.scripted import Script
from controlplane.api import body_parsing
from controlplane.api.protocol.requests import ChatCompletionRequest
from controlplane.api.settings import ApiSettings, BodyLimits
from tests.controlplane.api.example_bodies import CHAT, EMBED, TEXT
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage, listening, staged

RERANK = "/v1/rerank"
TOKENIZE = "/tokenize"
LONGEST_REPLY = 4_096
SIZE = 4_700_000


def chat(rest: bytes) -> bytes:
    return b'{"model":"%b","messages":[{"role":"user","content":"hi"}],%b}' % (CHAT_MODEL.encode(), rest)


def said(content: bytes) -> bytes:
    return b'{"model":"%b","messages":[%b]}' % (CHAT_MODEL.encode(), content)


def embed(given: bytes) -> bytes:
    return b'{"model":"%b","input":%b}' % (EMBED_MODEL.encode(), given)


def rerank(given: bytes) -> bytes:
    return b'{"query":"what","documents":%b}' % given


RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TURNS, TEXTS = "/v2/chat", "/v2/embed"
OUTPUT = b'{"type":"function_call_output","call_id":"c","output":"x"}'
HUGE_TOOL = b'{"type":"function","name":"f","parameters":{"minimum":%b}}' % (b"9" * 40)


def respond(given: bytes) -> bytes:
    return b'{"model":"%b","input":%b}' % (CHAT_MODEL.encode(), given)


def messages(content: bytes) -> bytes:
    said = b'{"role":"user","content":%b}' % content
    return b'{"model":"%b","max_tokens":1,"messages":[%b]}' % (CHAT_MODEL.encode(), said)


def turn(content: bytes) -> bytes:
    return said(b'{"role":"user","content":%b}' % content)


def texts(given: bytes) -> bytes:
    return b'{"model":"%b","texts":%b}' % (EMBED_MODEL.encode(), given)


def listed(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def keys(count: int) -> bytes:
    return b",".join(b'"k%d":1' % number for number in range(count))


# name, path, body, code
BODIES = [
    ("a million texts", EMBED, embed(listed(b'"a"', 1_000_000)), "body_too_complex"),
    ("a million negative token ids", EMBED, embed(listed(b"-1", 1_000_000)), "body_too_complex"),
    ("ignored strings", CHAT, chat(b'"metadata":{"a":%b}' % listed(b'"v"', 100_000)), "body_too_complex"),
    ("negative token ids", EMBED, embed(listed(b"-1", 300_000)), "invalid_value"),
    ("a negative token id at the end", EMBED, embed(listed(b"1", 300_000)[:-1] + b",-1]"), "invalid_value"),
    ("lists of negative ids", EMBED, embed(listed(b"[-1]", 90_000)), "invalid_value"),
    ("texts beyond the limit", EMBED, embed(listed(b'"a"', 90_000)), "invalid_value"),
    ("texts and numbers", EMBED, embed(listed(b'"a",1', 90_000)), "invalid_value"),
    ("a million documents", RERANK, rerank(listed(b'"a"', 1_000_000)), "body_too_complex"),
    ("documents beyond the limit", RERANK, rerank(listed(b'"a"', 90_000)), "invalid_value"),
    ("documents and numbers", RERANK, rerank(listed(b'"a",1', 40_000)), "invalid_value"),
    ("documents of unknown form", RERANK, rerank(listed(b'{"a":1}', 1_000)), "invalid_value"),
    ("a document of megabytes", RERANK, rerank(b'{"text":"%b"}' % (b"d" * SIZE)), "invalid_value"),
    (
        "a text of megabytes to tokenize",
        TOKENIZE,
        b'{"prompt":"%b"}' % (b"t" * SIZE),
        "context_length_exceeded",
    ),
    ("negative ids to decode", "/detokenize", b'{"tokens":%b}' % listed(b"-1", 300_000), "invalid_value"),
    ("unknown keys", CHAT, chat(keys(400_000)), "body_too_complex"),
    ("unknown keys within the limit", CHAT, chat(keys(19_000)), "unknown_parameter"),
    ("unknown key of megabytes", CHAT, chat(b'"%b":1' % (b"k" * SIZE)), "body_too_complex"),
    ("unknown key of a kilobyte", CHAT, chat(b'"%b":1' % (b"\\u0001" * 170)), "unknown_parameter"),
    ("value of megabytes", CHAT, chat(b'"temperature":"%b"' % (b"v" * SIZE)), "invalid_value"),
    (
        "value of control characters",
        CHAT,
        chat(b'"temperature":"%b"' % (b"\\u0001" * 9_000)),
        "invalid_value",
    ),
    ("model of megabytes", CHAT, said(b"").replace(CHAT_MODEL.encode(), b"m" * SIZE), "invalid_value"),
    ("class of megabytes", CHAT, chat(b'"service_class":"%b"' % (b"c" * SIZE)), "invalid_value"),
    ("number of megabytes", CHAT, chat(b'"max_tokens":%b' % (b"9" * SIZE)), "invalid_json"),
    ("number of 4,000 digits", CHAT, chat(b'"max_tokens":%b' % (b"9" * 4_000)), "context_length_exceeded"),
    ("nested lists", CHAT, b"[" * SIZE, "body_too_complex"),
    ("nested objects", CHAT, b'{"a":' * 3_000 + b"1" + b"}" * 3_000, "body_too_complex"),
    ("messages without fields", CHAT, said(b",".join([b"{}"] * 300_000)), "body_too_complex"),
    (
        "messages with unknown fields",
        CHAT,
        said(b",".join([b'{"x":1}'] * 15_000)),
        "missing_required_parameter",
    ),
    ("messages beyond the limit", CHAT, said(b",".join([b'{"role":"user"}'] * 4_097)), "invalid_value"),
    (
        "tools without fields",
        CHAT,
        chat(b'"tools":' + listed(b'{"a":1}', 15_000)),
        "missing_required_parameter",
    ),
    ("stop strings", CHAT, chat(b'"stop":' + listed(b'"x"', 90_000)), "invalid_value"),
    ("stop string of megabytes", CHAT, chat(b'"stop":"%b"' % (b"s" * SIZE)), "invalid_value"),
    ("stop strings of kilobytes", CHAT, chat(b'"stop":["x","%b"]' % (b"s" * 1_025)), "invalid_value"),
    (
        "stop sequences",
        MESSAGES,
        messages(b'"a"')[:-1] + b',"stop_sequences":["%b"]}' % (b"s" * 1_025),
        "invalid_value",
    ),
    ("stop tokens", CHAT, chat(b'"stop_token_ids":' + listed(b"-1", 90_000)), "invalid_value"),
    ("biases", CHAT, chat(b'"logit_bias":{%b}' % keys(15_000)), "invalid_value"),
    ("choices", CHAT, chat(b'"structured_outputs":{"choice":%b}' % listed(b'""', 90_000)), "invalid_value"),
    (
        "schema of many lists as a text",
        CHAT,
        chat(b'"structured_outputs":{"json":"{\\"$ref\\":\\"#/a\\",\\"a\\":%b}"}' % listed(b"[]", 800_000)),
        "body_too_complex",
    ),
    (
        "nested schema as a text",
        CHAT,
        chat(b'"structured_outputs":{"json":"{\\"a\\":%b}"}' % (b"[" * 400 + b"]" * 400)),
        "body_too_complex",
    ),
    (
        "schema of many lists",
        CHAT,
        chat(
            b'"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"$ref":"#/a","a":%b}}}'
            % listed(b"[]", 20_100)
        ),
        "invalid_value",
    ),
    (
        "text of megabytes",
        CHAT,
        said(b'{"role":"user","content":"%b"}' % (b"x" * SIZE)),
        "context_length_exceeded",
    ),
    (
        "items beyond the limit",
        RESPONSES,
        respond(listed(b'{"role":"user","content":"a"}', 4_097)),
        "invalid_value",
    ),
    ("items without fields", RESPONSES, respond(listed(b"{}", 4_096)), "invalid_value"),
    ("items of unknown type", RESPONSES, respond(listed(b'{"type":"x"}', 15_000)), "invalid_value"),
    ("an item of megabytes", RESPONSES, respond(b'"%b"' % (b"x" * SIZE)), "context_length_exceeded"),
    (
        "parts of an item",
        RESPONSES,
        respond(b'[{"role":"user","content":%b}]' % listed(b'{"type":"x"}', 19_000)),
        "invalid_value",
    ),
    ("outputs without calls", RESPONSES, respond(listed(OUTPUT, 4_096)), "invalid_value"),
    (
        "tool of megabytes",
        RESPONSES,
        respond(b'"a","tools":[{"type":"%b"}]' % (b"x" * SIZE)),
        "invalid_value",
    ),
    ("integer of 40 digits in a tool", RESPONSES, respond(b'"a","tools":[%b]' % HUGE_TOOL), "invalid_value"),
    ("blocks without fields", MESSAGES, messages(listed(b"{}", 15_000)), "missing_required_parameter"),
    ("blocks of unknown type", MESSAGES, messages(listed(b'{"type":"x"}', 15_000)), "invalid_value"),
    ("blocks beyond the limit", MESSAGES, messages(listed(b'{"type":"text"}', 4_097)), "invalid_value"),
    ("a block of megabytes", MESSAGES, messages(b'"%b"' % (b"x" * SIZE)), "context_length_exceeded"),
    ("a text to count", COUNT, messages(b'"%b"' % (b"x" * SIZE)), "unknown_parameter"),
    ("turns of unknown role", TURNS, said(b",".join([b'{"role":"x"}'] * 15_000)), "invalid_value"),
    ("turns beyond the limit", TURNS, said(b",".join([b'{"role":"user"}'] * 4_097)), "invalid_value"),
    ("turns without content", TURNS, said(b",".join([b'{"role":"user"}'] * 4_096)), "invalid_value"),
    ("parts of unknown type", TURNS, turn(listed(b'{"type":"x"}', 15_000)), "invalid_value"),
    ("parts beyond the limit", TURNS, turn(listed(b'{"type":"text"}', 4_097)), "invalid_value"),
    ("a part of megabytes", TURNS, turn(b'"%b"' % (b"x" * SIZE)), "context_length_exceeded"),
    ("types of vectors", TEXTS, texts(b'["a"],"embedding_types":' + listed(b'"x"', 15_000)), "invalid_value"),
    (
        "texts of megabytes",
        TEXTS,
        texts(b'["%b"],"truncate":"NONE"' % (b"x" * SIZE)),
        "context_length_exceeded",
    ),
    ("texts beyond Cohere's limit", TEXTS, texts(listed(b'"a"', 90_000)), "invalid_value"),
    ("numbers as texts", TEXTS, texts(listed(b"1", 90_000)), "invalid_value"),
    (
        "a text of megabytes for Cohere's tokens",
        "/v1/tokenize",
        b'{"model":"%b","text":"%b"}' % (CHAT_MODEL.encode(), b"t" * SIZE),
        "context_length_exceeded",
    ),
    ("unpaired quote", CHAT, b'{"model":"' + b"x" * SIZE, "invalid_json"),
    ("escapes", CHAT, said(b'"%b"' % (b"\\\\" * (SIZE // 2))), "invalid_value"),
]


@pytest.mark.parametrize(
    ("path", "body", "code"), [row[1:] for row in BODIES], ids=[row[0] for row in BODIES]
)
async def test_body_is_refused_with_a_short_reply(stage: Stage, path: str, body: bytes, code: str):
    answer = await stage.http.post(path, content=body)
    check_refusal(answer, 400, code)
    assert not stage.generator.runs and not stage.embedder.runs


NUMBERS = b'{"type":"function","function":{"name":"f","parameters":{"enum":%b}}}' % listed(b"1000", 390_000)


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        (embed(listed(b"-1", 1_000_000)), (CHAT, TEXT, EMBED)),
        (chat(keys(400_000)), (CHAT, TEXT, EMBED)),
        (b"[" * SIZE, (CHAT, TEXT, EMBED)),
        # Token ids may be as many, and these bodies have none.
        (chat(b'"tools":[%b]' % NUMBERS), (CHAT, TOKENIZE, MESSAGES, RESPONSES, TURNS)),
    ],
    ids=["ids", "keys", "nesting", "numbers"],
)
async def test_body_beyond_the_structural_limits_is_never_validated(
    stage: Stage, body: bytes, paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(BaseModel, "model_validate_json", lambda content: pytest.fail("validated"))
    for path in paths:
        check_refusal(await stage.http.post(path, content=body), 400, "body_too_complex")


async def test_only_large_bodies_are_parsed_in_a_thread(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    threads: list[tuple[int, bool]] = []
    parse = body_parsing.parse_body

    def observed(body: bytes, model: Any, limits: BodyLimits) -> Any:
        threads.append((len(body), threading.current_thread() is threading.main_thread()))
        return parse(body, model, limits)

    monkeypatch.setattr(body_parsing, "parse_body", observed)
    small, large = embed(b'"hi"'), embed(b'"%b"' % (b"x" * 70_000))
    assert (await stage.http.post(EMBED, content=small)).status_code == 200
    check_refusal(await stage.http.post(EMBED, content=large), 400, "context_length_exceeded")
    assert threads == [(len(small), True), (len(large), False)]


async def test_health_is_answered_while_a_large_body_is_parsed(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    parse, has_begun, may_end = body_parsing.parse_body, threading.Event(), threading.Event()

    def stopped(body: bytes, model: Any, limits: BodyLimits) -> Any:
        has_begun.set()
        assert may_end.wait(10)
        return parse(body, model, limits)

    monkeypatch.setattr(body_parsing, "parse_body", stopped)
    large = asyncio.create_task(stage.http.post(EMBED, content=embed(listed(b"-1", 50_000))))
    await asyncio.to_thread(has_begun.wait, 10)
    assert (await stage.http.get("/health")).status_code == 200
    monkeypatch.setattr(body_parsing, "parse_body", parse)
    assert (await stage.http.post(EMBED, content=embed(b'"hi"'))).status_code == 200
    assert not large.done()
    may_end.set()
    check_refusal(await large, 400, "invalid_value")


@pytest.mark.parametrize("field", ["content", "tool_calls"])
async def test_text_that_cannot_fit_is_not_tokenized(
    stage: Stage, field: str, monkeypatch: pytest.MonkeyPatch
):
    async def fail(*_: object, **__: object) -> list[int]:
        pytest.fail("tokenized")

    monkeypatch.setattr(stage.generator, "tokenize", fail)
    monkeypatch.setattr(stage.embedder, "tokenize", fail)
    long = "x" * 5_000
    answer = await stage.http.post(TEXT, json={"model": CHAT_MODEL, "prompt": long})
    check_refusal(answer, 400, "context_length_exceeded")
    answer = await stage.http.post(EMBED, json={"model": EMBED_MODEL, "input": ["a", long]})
    check_refusal(answer, 400, "context_length_exceeded")
    assert "input[1] has 5,000 characters" in answer.json()["error"]["message"]


async def test_truncated_text_is_cut_before_it_is_tokenized(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    lengths: list[int] = []
    tokenize = stage.embedder.tokenize

    async def observed(texts: list[str], *, prompt: str | None = None) -> list[list[int]]:
        lengths.extend(map(len, texts))
        return await tokenize(texts, prompt=prompt)

    monkeypatch.setattr(stage.embedder, "tokenize", observed)
    text = "".join(chr(33 + number % 90) for number in range(100_000))
    for side, expected in (("right", text[:10]), ("left", text[-10:])):
        fields = {"truncate_prompt_tokens": 10, "truncation_side": side}
        body = {"model": EMBED_MODEL, "input": text} | fields
        assert (await stage.http.post(EMBED, json=body)).status_code == 200
        assert bytes(stage.embedder.runs[-1].inputs[0]).decode() == expected
    assert max(lengths) <= 200


AMPLIFIED = [
    (CHAT, {"n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 200}, "n", 400),
    (CHAT, {"logprobs": True, "top_logprobs": 20, "max_tokens": 100}, "logprobs", 400),
    (TEXT, {"n": 128, "logprobs": 20, "max_tokens": 100}, "n", 400),
    (TEXT, {"prompt": ["a"] * 100, "logprobs": 5, "max_tokens": 5}, "logprobs", 400),
    (TEXT, {"n": 2, "max_tokens": 200}, None, 200),
    (CHAT, {"max_tokens": 200}, None, 200),
]


@pytest.mark.parametrize(("path", "fields", "param", "status"), AMPLIFIED)
async def test_values_of_an_answer_are_bounded(
    path: str, fields: dict[str, Any], param: str | None, status: int
):
    body = {
        "model": CHAT_MODEL,
        **({"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {}),
    }
    async with staged(server={"limits": {"max_answer_values": 1_000}}) as stage:
        answer = await stage.http.post(
            path, json={**body, **({} if path == CHAT else {"prompt": "hi"}), **fields}
        )
        assert answer.status_code == status, answer.text
        if param is not None:
            check_refusal(answer, 400, "answer_too_large")
            assert answer.json()["error"]["param"] == param


async def test_answer_without_max_tokens_ends_at_the_bound_of_its_values():
    async with staged(server={"limits": {"max_answer_values": 120}}) as stage:
        stage.generator.default = Script(tokens=200, words=("a",))
        body = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "hi"}], "n": 2}
        answer = await stage.http.post(CHAT, json=body | {"logprobs": True, "top_logprobs": 2})
        assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["length"] * 2
        assert answer.json()["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("digits", [b"9" * 5_001, b"9" * 40, b"0" * 50 + b"9" * 9])
async def test_content_length_of_many_digits(stage: Stage, digits: bytes):
    answer = await stage.http.post(EMBED, content=b"{}", headers={"content-length": digits.decode()})
    check_refusal(answer, 413, "request_too_large")


async def test_refusals_over_a_socket_leave_the_server_serving():
    async with (
        staged(ApiSettings(limits=BodyLimits(max_body=1_000_000))) as stage,
        listening(stage.app) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        bodies = [listed(b"-1", 100_000), listed(b'"a"', 100_000), b"[" * 500_000]
        answers = await asyncio.gather(*(http.post(EMBED, content=embed(body)) for body in bodies * 4))
        assert {answer.status_code for answer in answers} == {400}
        assert (await http.post(EMBED, content=embed(b'"hi"'))).status_code == 200


def check_refusal(answer: httpx.Response, status: int, code: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), answer.text[:500]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(answer.content) <= LONGEST_REPLY
    assert orjson.loads(answer.content) == answer.json()


async def test_an_echoed_prompt_counts_for_each_choice(stage: Stage):
    """A reply of half a gigabyte follows from 128 prompts of 33 KB and 128 choices of each."""
    body = {"model": CHAT_MODEL, "prompt": "x" * 200, "echo": True, "max_tokens": 1}
    async with staged(server={"limits": {"max_answer_values": 1_000}}) as small:
        assert (await small.http.post(TEXT, json=body)).status_code == 200
        assert (await small.http.post(TEXT, json={**body, "n": 4})).status_code == 200
        refused = await small.http.post(TEXT, json={**body, "n": 5})
        check_refusal(refused, 400, "answer_too_large")


@pytest.mark.parametrize("field", ["metadata", "prediction", "prompt_cache_options"])
def test_a_field_without_effect_is_not_kept(field: str):
    """A request that waits keeps its body, of whose megabytes no limit of the gate would know."""
    content = chat(b'"%b":{"a":["x"]}' % field.encode())
    assert getattr(body_parsing.parse_body(content, ChatCompletionRequest, BodyLimits()), field) is None
