"""Objects of a finished request are freed by reference counting; the server collects garbage rarely."""

import gc
from types import FrameType
from typing import Any

import pytest

from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage

MESSAGES = [{"role": "user", "content": "hi"}]


def module_of(thing: object) -> str:
    if isinstance(thing, FrameType):
        return thing.f_globals["__name__"]
    return getattr(thing, "__module__", None) or ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("embeddings", {"model": EMBED_MODEL, "input": "hi"}, 200),
        ("embeddings", {"model": EMBED_MODEL, "input": "h" * 5_000}, 400),
        ("embeddings", {"model": EMBED_MODEL, "input": []}, 400),
        ("chat/completions", {"model": CHAT_MODEL, "messages": MESSAGES, "max_tokens": 4}, 200),
        ("chat/completions", {"model": CHAT_MODEL, "messages": MESSAGES, "stream": True}, 200),
        ("rerank", {"query": "what", "documents": ["a", "b"]}, 200),
        ("rerank", {"query": "what", "documents": []}, 400),
        ("score", {"text_1": "what", "text_2": ["a", "b"]}, 200),
        ("completions", {"model": CHAT_MODEL, "prompt": ["a", "b"], "max_tokens": 4}, 200),
    ],
)
async def test_objects_of_a_request_are_freed_without_garbage_collection(
    stage: Stage, path: str, body: dict[str, Any], status: int
):
    async def ask() -> None:
        assert (await stage.http.post(f"/v1/{path}", json=body)).status_code == status

    await ask()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(5):
            await ask()
        gc.collect()
        left = [thing for thing in gc.garbage if module_of(thing).startswith(("controlplane", "backends"))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == []
