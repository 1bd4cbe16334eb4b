"""Limits of a body's structure: measured on the bytes, before anything is parsed."""

import asyncio
import json
import platform
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controlplane.api import body_parsing
from controlplane.api.body_parsing import (
    BodyParser,
    Structure,
    check_structure,
    object_bytes,
    parse_body,
    parse_json,
    structure_of,
)
from controlplane.api.errors import Problem
from controlplane.api.memory_release import MemoryRelease
from controlplane.api.openai.sampling import chat_prompt, chat_sampling
from controlplane.api.post_endpoint import _Endpoint
from controlplane.api.protocol.anthropic_messages import CountTokensRequest, MessagesRequest
from controlplane.api.protocol.requests import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from controlplane.api.protocol.responses_messages import ResponsesRequest
from controlplane.api.settings import BodyLimits
from tests.controlplane.api.example_bodies import CHAT, TEXT, chat, text
from tests.controlplane.api.scripted_server import staged

names = st.text(max_size=6) | st.sampled_from(['"', "\\", '\\"', "a:b", "[{,", "\\\\"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def members(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(members, value.values()))
    return sum(map(members, value)) if isinstance(value, list) else 0


def items(value: Any) -> int:
    if isinstance(value, dict | list):
        return len(value) + sum(map(items, value.values() if isinstance(value, dict) else value))
    return 0


def strings(value: Any) -> int:
    if isinstance(value, dict | list):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return 1 + sum(map(strings, inner))
    return int(isinstance(value, str))


@pytest.mark.long
@given(values)
@pytest.mark.parametrize("option", [0, orjson.OPT_INDENT_2])
def test_structure_of_any_value(option: int, value: Any):
    text = orjson.dumps(value, option=option)
    found = structure_of(text)
    assert found.max_depth == depth(value)
    assert found.max_members == members(value)
    assert found.max_strings == strings(value)
    assert items(value) <= found.max_values <= items(value) + text.count(b"[]") + text.count(b"{}")


@given(values)
@pytest.mark.parametrize("part_bytes", [1, 2, 5])
def test_a_text_measured_in_parts_has_the_structure_of_the_whole(part_bytes: int, value: Any):
    text = orjson.dumps(value)
    with patch.object(body_parsing, "_PART_BYTES", part_bytes):
        in_parts = structure_of(text)
    assert in_parts == structure_of(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"abc": 1}', Structure(1, 1, 1, 2, 3)),
        (b'{"a\\"b" : [1, 2, {"c": ":,[{"}]}', Structure(3, 2, 5, 6, 4)),
        (b'{"\\\\": {"\\\\\\"": 1}}', Structure(2, 2, 2, 4, 4)),
        (b"[[], [], 1]", Structure(2, 0, 5, 3, 0)),
        (b"1", Structure(0, 0, 0, 0, 0)),
        (b"", Structure(0, 0, 0, 0, 0)),
        (b'"unterminated [[[', Structure(0, 0, 0, 1, 0)),
        (b":::", Structure(0, 3, 0, 0, 0)),
    ],
)
def test_structure(text: bytes, expected: Structure):
    assert structure_of(text) == expected


LIMITS = BodyLimits(inline_body=100, max_depth=3, max_members=5, max_values=20, max_strings=8, max_name=8)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (b'{"a":{"a":{"a":{"a":1}}}}', "max_depth"),
        (b"[[[[1]]]]", "max_depth"),
        (b'{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}', "max_members"),
        (b"[" + b",".join([b"1"] * 22) + b"]", "max_values"),
        (b'["",{},[],"","",{},[],[]]', "max_strings"),
        (b'{"' + b"n" * 100 + b'":1}', "max_name"),
    ],
)
def test_limit_is_named(text: bytes, limit: str):
    with pytest.raises(Problem, match=rf"server\.limits\.{limit} is") as problem:
        check_structure(text, LIMITS, has_token_ids=True)
    assert problem.value.failure.status == 400


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":{"a":{"a":1}}}',
        b'{"a":1,"b":1,"c":1,"d":1,"e":1}',
        b'{"text":"' + b"[[[[{{{{::::::::" * 50 + b'"}',
        b'{"text":"' + b"," * 500 + b'"}',
        b'["",{},[],"","",{},[],1,2,3,4]',
    ],
)
def test_body_within_the_limits(text: bytes):
    check_structure(text, LIMITS, has_token_ids=True)


def test_a_body_has_strings_and_other_values_in_proportion():
    """To build the most of both together would keep the interpreter lock twice as long."""
    with pytest.raises(Problem, match="5 or more strings, lists and objects and 10 or more other values"):
        check_structure(b'["","","","",%b]' % b",".join([b"1"] * 16), LIMITS, has_token_ids=True)
    check_structure(b'["","","","",%b]' % b",".join([b"1"] * 8), LIMITS, has_token_ids=True)


def test_a_text_without_token_ids_has_no_more_values_than_strings():
    for ids, limits in ((b"1,1,1,1,1,1,1,1,1", LIMITS), (b"1,1,1,1,1", replace(LIMITS, max_values=4))):
        with pytest.raises(Problem, match=r"members and list items, and server\.limits\."):
            check_structure(b"[%b]" % (ids + b" " * 100), limits)
    check_structure(b"[1,1,1,1,1,1,1,1%b]" % (b" " * 100), LIMITS)


async def test_only_bodies_with_token_ids_have_more():
    async with staged() as stage:
        endpoints = [(route.path, getattr(route, "endpoint", None)) for route in stage.app.routes]
    found = {path for path, each in endpoints if isinstance(each, _Endpoint) and each.model.takes_token_ids}
    assert found == {"/v1/completions", "/v1/embeddings", "/embed", "/", "/detokenize", "/v1/detokenize"}


MAPPED = (ResponsesRequest, MessagesRequest, CountTokensRequest)
MODELS = (ChatCompletionRequest, CompletionRequest, EmbeddingRequest, *MAPPED)
FIELDS = sorted({name for model in MODELS for name in model.model_fields} | {"json", "type", "schema"})
TYPES = (
    "message function_call function_call_output reasoning text tool_use tool_result thinking input_text "
    "output_text image"
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(FIELDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
    max_leaves=12,
)  # fmt: skip
REQUIRED = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "input": "x", "prompt": "x"}
chats = st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6).map(lambda more: REQUIRED | more)


def as_bytes(value: Any) -> bytes:
    """With NaN, infinities and integers of any size, which are not JSON."""
    return json.dumps(value, ensure_ascii=False).encode()


@given(st.binary(max_size=300) | json_values.map(as_bytes) | chats.map(as_bytes))
@example(b"\xef\xbb\xbf{}")
@example(b'{"a":' * 70 + b"1" + b"}" * 70)
@example(b'"\\ud800"')
@example(b'{"model":"\\ud800"}')
@example(b'{"max_tokens":1' + b"0" * 5_000 + b"}")
def test_any_bytes_are_parsed_or_refused_with_an_error_object(body: bytes):
    for model in MODELS:
        try:
            assert isinstance(parse_body(body, model, BodyLimits()), model)
        except Problem as problem:
            check_error(problem)
    try:
        parse_json(body, BodyLimits())
    except Problem as problem:
        check_error(problem)


# Members and types of items and blocks, each with a value that is valid for most of them.
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(TYPES.split())},
    optional={
        **{name: st.sampled_from(["a", "b"]) for name in ("id", "name", "call_id", "tool_use_id", "text")},
        **{name: st.just("{}") for name in ("arguments", "thinking", "role")},
        "role": st.sampled_from(["user", "assistant", "system"]),
        "input": json_values,
        "output": st.just("x") | json_values,
        "content": st.just("x") | json_values,
    },
)
ITEMS = st.lists(PARTS, min_size=1, max_size=4)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": ITEMS}),
    min_size=1,
    max_size=3,
)
SCHEMAS = st.just({"type": "object"}) | st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3)


@pytest.mark.long
@given(
    ITEMS | st.just("hi"),
    MESSAGES,
    st.none() | SCHEMAS,
    st.none() | st.sampled_from(["auto", "required", {"type": "any"}, {"type": "tool", "name": "f"}]),
)
def test_any_mapped_body_becomes_a_chat_or_is_refused(items: Any, messages: Any, schema: Any, choice: Any):
    tools = [{"type": "function", "name": "f", "parameters": schema}]
    responses = {"model": "m", "input": items, "tools": tools, "tool_choice": choice}
    tools = [{"name": "f", "input_schema": schema}]
    counted = {"model": "m", "messages": messages, "tools": tools, "tool_choice": choice}
    bodies = (responses, counted | {"max_tokens": 1}, counted)
    for model, body in zip(MAPPED, bodies, strict=True):
        try:
            parsed = parse_body(as_bytes(body), model, BodyLimits())
            chat = parsed.chat
            assert chat_prompt(chat).messages
            assert chat_sampling(chat, BodyLimits()).n == 1
            # Strict validation of the same request finds no fault.
            assert type(chat)(**chat.model_dump(by_alias=True, exclude_none=True)).messages
        except Problem as problem:
            check_error(problem)


def check_error(problem: Problem) -> None:
    error = orjson.loads(problem.failure.body)["error"]
    assert problem.failure.status == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["message"] and error["code"]
    assert len(problem.failure.body) <= 4_096


async def test_memory_is_released_after_a_large_body_and_once_for_several(monkeypatch: pytest.MonkeyPatch):
    trimmed, threads = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def trim(pad: int) -> int:
        threads.append((pad, threading.current_thread() is threading.main_thread()))
        loop.call_soon_threadsafe(trimmed.set)
        return 1

    monkeypatch.setattr("controlplane.api.memory_release._DELAY_SECONDS", 0.0)
    release, limits = MemoryRelease(trim), BodyLimits(inline_body=100)
    parser = BodyParser(release)
    small, large = b'{"model":"m","input":"x"}', b'{"model":"m","input":"%b"}' % (b"x" * 200)
    await parser.parse(small, EmbeddingRequest, limits, tenant="red")
    assert release._pending is None
    for body in (large, large[:-1]):
        with suppress(Problem):
            await parser.parse(body, EmbeddingRequest, limits, tenant="red")
    await trimmed.wait()
    assert set(threads) == {(0, False)}


def test_memory_is_returned_to_the_system_where_the_c_library_can():
    assert MemoryRelease()._trim is not None or "glibc" not in platform.libc_ver()


def memory(value: Any, seen: set[int]) -> int:
    """Bytes of a parsed value, each object counted once."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return sys.getsizeof(value) + sum(memory(each, seen) for each in inner)


LONG = "x" * 10_000


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([{}] * 1_000),
        json.dumps([[]] * 1_000),
        json.dumps([{"a": 1}] * 1_000),
        json.dumps([[1]] * 1_000),
        json.dumps(list(range(1_000, 2_000))),
        json.dumps([each / 7 for each in range(1_000)]),
        json.dumps([f"{each:x}" for each in range(1_000)]),
        json.dumps({f"{each:x}": each for each in range(1_000)}),
        json.dumps([LONG, "é"]),
        json.dumps([LONG + "é"], ensure_ascii=False),
        json.dumps([LONG + "中"]),
        json.dumps([LONG + "中"], ensure_ascii=False),
        json.dumps([LONG + "🙂"]),
        json.dumps([LONG + "🙂"], ensure_ascii=False),
    ],
)
def test_the_memory_of_a_parsed_body_is_estimated_from_above(text: str):
    found = object_bytes(text.encode())
    assert memory(json.loads(text), set()) <= found
    assert object_bytes(text.encode(), found - 1) == found


def test_text_takes_its_bytes():
    """Its commas and quotes separate nothing."""
    text = json.dumps({"content": 'a, b: "c" [1, 2], ' * 5_000}).encode()
    assert len(text) <= object_bytes(text) <= len(text) + 1_000
    assert object_bytes(text) < object_bytes(text, 10**9)


@pytest.mark.parametrize(
    ("max_depth", "levels", "code"),
    [
        (8, 8, "body_too_complex"),
        (8, 7, None),
        (100, 90, None),
        # The parser follows 200 levels, whatever the limit.
        (900, 600, "invalid_value"),
    ],
)
async def test_a_schema_that_is_a_text_has_the_configured_limits(
    max_depth: int, levels: int, code: str | None
):
    schema = '{"a":' + "[" * levels + "]" * levels + "}"
    async with staged(server={"limits": {"max_depth": max_depth}}) as stage:
        for path, asked in ((CHAT, chat), (TEXT, text)):
            answer = await stage.http.post(path, json=asked(structured_outputs={"json": schema}))
            if code is None:
                assert answer.status_code == 200, answer.text
                continue
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, code), answer.text
            assert "structured_outputs.json" in error["message"]
