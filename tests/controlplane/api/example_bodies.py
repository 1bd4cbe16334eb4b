"""Paths and smallest valid bodies of the API, an answer with tool calls, and an API key."""

from hashlib import sha256
from typing import Any

from backends.testing.scripted import Script
from controlplane.api.settings import ApiKey
from controlplane.core.generation import ChatPrompt, Sampling
from controlplane.service.request_jobs import Caller
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EMBED = "/v1/embeddings"
HI: list[Any] = [{"role": "user", "content": "hi"}]
SECRET = "sk-of-the-tests"
"""The key that the fixture `locked` accepts."""
CALLS = (
    {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": '}},
    {"index": 0, "function": {"arguments": "1}"}},
    {"index": 1, "id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
)
"""One call that arrives in two pieces, and a second one."""
CALLING = Script(tokens=3, words=("Sure", "."), reasoning_words=("Hm",), tool_calls=CALLS)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": CHAT_MODEL, "messages": HI} | fields


def text(**fields: Any) -> dict[str, Any]:
    return {"model": CHAT_MODEL, "prompt": "hi"} | fields


def embed(**fields: Any) -> dict[str, Any]:
    return {"model": EMBED_MODEL, "input": "hi"} | fields


def api_key(secret: str, tenant: str = "tests", *classes: str) -> ApiKey:
    """The entry of a key of `tenant`, which may use `classes`, or all if none is named."""
    return ApiKey(sha256(secret.encode()).hexdigest(), Caller(tenant, frozenset(classes) or None))


def conversation(stage: Stage) -> tuple[ChatPrompt, Sampling]:
    """The last chat that the engine got, and its sampling."""
    run = stage.generator.runs[-1]
    assert run.chat is not None and run.sampling is not None
    return run.chat, run.sampling
