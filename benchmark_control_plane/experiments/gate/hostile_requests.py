"""Requests that are meant to exhaust a server: large, deep or costly bodies, and headers without end."""

import http.client
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES = "/v1/messages"
_MB_IN_HEADER = 66
_TIMEOUT_S = 300.0


def _chat(content: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "tiny-llama", "messages": messages, **fields}).encode()


def _embed(given: object, **fields: object) -> bytes:
    return json.dumps({"model": "minilm", "input": given, **fields}, separators=(",", ":")).encode()


def _schema(schema: dict[str, object]) -> tuple[str, bytes]:
    named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return CHAT, _chat("hi", max_tokens=2, response_format=named)


def _object(properties: int, *, optional: bool = False) -> dict[str, object]:
    names = [f"p{number}" for number in range(properties)]
    required = {} if optional else {"required": names}
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, **required}


def _structured(**constraint: object) -> tuple[str, bytes]:
    return CHAT, _chat("hi", max_tokens=2, structured_outputs=constraint)


def _tools(properties: int) -> tuple[str, bytes]:
    function = {"name": "act", "parameters": _object(properties)}
    tools = [{"type": "function", "function": function}]
    return CHAT, _chat("hi", max_tokens=2, tools=tools, tool_choice="required")


def _offered(*schemas: dict[str, object]) -> bytes:
    functions = [{"name": f"act{at}", "parameters": schema} for at, schema in enumerate(schemas)]
    return _chat("hi", max_tokens=2, tools=[{"type": "function", "function": each} for each in functions])


def _thoughts(count: int, characters: int) -> bytes:
    blocks = [{"type": "thinking", "thinking": "x" * characters}] * count
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": blocks}]
    return json.dumps({"model": "tiny-llama", "messages": turns, "max_tokens": 2}).encode()


def _turns(count: int, **fields: object) -> bytes:
    messages = [{"role": "assistant"}] * count
    return json.dumps({"model": "tiny-llama", "messages": messages, "max_tokens": 2, **fields}).encode()


def _annotated(annotations: list[object]) -> bytes:
    messages = [{"role": "user", "content": "hi", "annotations": annotations}]
    fields = {"max_tokens": 400, "ignore_eos": True}
    return json.dumps({"model": "tiny-llama", "messages": messages, **fields}, separators=(",", ":")).encode()


def _called(arguments: str) -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": "act", "arguments": arguments}}
    return json.dumps(
        {"model": "tiny-llama", "messages": [{"role": "assistant", "tool_calls": [call]}], "max_tokens": 2}
    ).encode()


def _echoed(prompts: int, choices: int) -> bytes:
    fields = {"n": choices, "echo": True, "max_tokens": 1}
    return json.dumps({"model": "tiny-llama", "prompt": ["x " * 900] * prompts, **fields}).encode()


def _completion(**fields: object) -> bytes:
    return json.dumps({"model": "tiny-llama", "prompt": "hi", "ignore_eos": True, **fields}).encode()


def _keys(count: int) -> dict[str, object]:
    return {f"k{number}": 1 for number in range(count)}


# Name: path and body. A body of more than 4.8 MB is beyond the default `server.limits.max_body`.
_BODIES: dict[str, Callable[[], tuple[str, bytes]]] = {
    "harmless": lambda: (EMBED, _embed("hello")),
    "32 MB of texts": lambda: (EMBED, _embed(["a"] * 8_000_000)),
    "28 MB of unknown keys": lambda: (CHAT, _chat("hi", **_keys(2_200_000))),
    "30 MB key": lambda: (CHAT, _chat("hi", **{"k" * 30_000_000: 1})),
    "30 MB text": lambda: (CHAT, _chat("word " * 6_000_000)),
    "million negative ids": lambda: (EMBED, _embed([-1] * 1_000_000)),
    "4.7 MB of brackets": lambda: (CHAT, b"[" * 4_700_000),
    "4.7 MB of texts": lambda: (EMBED, _embed(["a"] * 1_170_000)),
    "400,000 negative ids": lambda: (EMBED, _embed([-1] * 399_000)),
    "negative id at the end": lambda: (EMBED, _embed([1] * 399_000 + [-1])),
    "19,000 unknown keys": lambda: (CHAT, _chat("hi", **_keys(19_000))),
    "4.7 MB key": lambda: (CHAT, _chat("hi", **{"k" * 4_700_000: 1})),
    "4.7 MB value": lambda: (CHAT, _chat("hi", temperature="v" * 4_700_000)),
    "4.7 MB text": lambda: (CHAT, _chat("word " * 940_000)),
    "2.4 MB text": lambda: (TEXT, json.dumps({"model": "tiny-llama", "prompt": "x" * 2_400_000}).encode()),
    # Its tokens are cut to the model's, so that no number of characters is too many for the context.
    "2.4 MB text to cut": lambda: (EMBED, _embed("word " * 480_000, truncate_prompt_tokens=-1)),
    "32 KB text": lambda: (CHAT, _chat("x" * 32_000)),
    "schema": lambda: _schema(_object(10)),
    "known schema": lambda: _schema(_object(10)),
    "2,000 optional properties": lambda: _schema(_object(2_000, optional=True)),
    "1,000 optional properties": lambda: _schema(_object(1_000, optional=True)),
    "tool of 1,000 properties": lambda: _tools(1_000),
    "20,000 properties": lambda: _schema({"allOf": [_object(900) for _ in range(22)]}),
    "maxLength of a million": lambda: _schema({"type": "string", "maxLength": 1_000_000}),
    "100,000 choices": lambda: _structured(choice=[f"choice {number}" for number in range(100_000)]),
    "200 KB regular expression": lambda: _structured(regex="a" * 200_000),
    "60 KB regular expression": lambda: _structured(regex="|".join(f"w{n}x[a-z]+" for n in range(5_000))),
    "ambiguous grammar": lambda: _structured(
        grammar="root ::= a a a a a a a a\na ::= [a-z]* [a-z ]* [a-z]* [a-z ]*"
    ),
    "schema of many lists in a text": lambda: _structured(
        json='{"$ref":"#/a","a":[' + "[]," * 1_500_000 + "0]}"
    ),
    "schema of 400 levels in a text": lambda: _structured(json='{"a":' + "[" * 400 + "]" * 400 + "}"),
    # The most objects, lists and numbers that a chat may have, in fields that it keeps.
    "schema of 49,000 objects": lambda: _schema({"default": [{}] * 49_000}),
    "tool of 49,000 lists": lambda: (CHAT, _offered({"enum": [[]] * 49_000})),
    "tool of 99,000 numbers": lambda: (CHAT, _offered({"enum": list(range(1_000, 100_000))})),
    # More than that, where only `max_strings` or `max_values` would allow it.
    "tool of 90,000 lists": lambda: (CHAT, _offered({"enum": [[]] * 90_000})),
    "tool of 390,000 numbers": lambda: (CHAT, _offered({"enum": list(range(1_000, 391_000))})),
    # The most numbers in a body that may have token ids instead.
    "schema of 390,000 numbers": lambda: (
        TEXT,
        _completion(structured_outputs={"json": {"enum": list(range(1_000, 391_000))}}, max_tokens=2),
    ),
    "tools of 9,000 properties": lambda: (CHAT, _offered(*[_object(900)] * 10)),
    "4,000 thoughts": lambda: (MESSAGES, _thoughts(4_000, 1_100)),
    # Many templates write it after each message of the assistant.
    "end of turn of 4.4 MB": lambda: (
        CHAT,
        _turns(4_000, chat_template_kwargs={"eos_token": "x" * 4_400_000}),
    ),
    "option of 4.4 MB": lambda: (CHAT, _turns(4_000, chat_template_kwargs={"style": "x" * 4_400_000})),
    "4.4 MB of arguments of a call": lambda: (CHAT, _called("[" + "[]," * 1_450_000 + "0]")),
    # The most strings that are accepted; they stay as long as it waits or runs, unless they are dropped.
    "3.8 MB of metadata": lambda: (
        CHAT,
        _chat("hi", max_tokens=400, ignore_eos=True, metadata={"a": ["value of metadata" * 2] * 99_000}),
    ),
    # Within the limit of lists and that of values of other bodies, but not in proportion.
    "300,000 annotations": lambda: (CHAT, _annotated([[]] * 90_000 + list(range(1_000, 211_000)))),
    # The most objects that are accepted, where templates do not read them.
    "49,000 annotations": lambda: (CHAT, _annotated([{}] * 49_000)),
    "380,000 strings": lambda: (CHAT, _chat("hi", metadata={"a": ["value"] * 380_000})),
    "echo for 128 choices": lambda: (TEXT, _echoed(128, 128)),
    "65 stop tokens": lambda: (CHAT, _chat("hi", min_tokens=1, max_tokens=2, stop_token_ids=list(range(65)))),
    "n and logprobs": lambda: (CHAT, _chat("hi", n=128, logprobs=True, top_logprobs=20, max_tokens=400)),
    "128 answers": lambda: (CHAT, _chat("hi", n=128, max_tokens=16, ignore_eos=True)),
    "16 answers with logprobs": lambda: (
        CHAT,
        _chat("hi", n=16, logprobs=True, top_logprobs=20, max_tokens=100, ignore_eos=True),
    ),
    "16 completions with logprobs": lambda: (TEXT, _completion(n=16, logprobs=20, max_tokens=100)),
}


def _answered_late() -> bytes:
    """The rest of a chat behind its keys' line."""
    body = _chat("hi", max_tokens=400, ignore_eos=True)
    return b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


# Name: what follows the request line and the keys' line, which are checked after the headers.
_HEADERS: dict[str, Callable[[], bytes]] = {
    "66 MiB header": lambda: b"x-filler: " + b"h" * (_MB_IN_HEADER * 2**20),
    "100,000 headers": lambda: b"\r\n".join([b"x-filler: h"] * 100_000),
    "content-length of 5,001 digits": lambda: b"content-length: " + b"9" * 5_001,
    "4.7 MB in chunks of a byte": lambda: b"transfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 780_000,
    "14,000 requests sent ahead": lambda: _answered_late() + b"GET /health HTTP/1.1\r\n\r\n" * 14_000,
}
BODIES, HEADERS = tuple(_BODIES), tuple(_HEADERS)
NAMES = (*BODIES, *HEADERS)
# Where what costs is the work before the rate is charged; the other attackers have no rate limit, so that a
# request has its cost whatever was sent before it.
_RATE_LIMITED = {"2.4 MB text to cut"}
# Within the limits of a grammar's text; refused once its compilation takes longer than the engine may wait.
LIMITED_BY_TIME = {"60 KB regular expression"}


@dataclass(frozen=True, slots=True)
class Reply:
    """Status (0: closed without a reply), seconds from the last byte sent to the reply, and bytes of it."""

    status: int
    seconds: float
    size: int


def sender_of(name: str) -> str:
    """The tenant that sends this request: `attacker`, or `limited` with few tokens a minute."""
    return "limited" if name in _RATE_LIMITED else "attacker"


def request_of(name: str, key: str) -> bytes:
    """The request of this name, with the API key of a tenant."""
    path, body = _BODIES[name]() if name in _BODIES else (CHAT, b"")
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {key}"]
    if name in _BODIES:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    head = [line.encode() for line in lines] + ([] if name in _BODIES else [_HEADERS[name]()])
    return b"\r\n".join([*head, b"", body])


def send(port: int, request: bytes) -> Reply:
    """Sends a request on a connection of its own."""
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
        # What is refused by its length is not read; the reply may still be.
        with suppress(ConnectionError):
            connection.sendall(request)
        start = time.monotonic()
        try:
            response = http.client.HTTPResponse(connection, method="POST")
            response.begin()
            return Reply(response.status, time.monotonic() - start, len(response.read()))
        except (ConnectionError, http.client.HTTPException):
            return Reply(0, time.monotonic() - start, 0)
