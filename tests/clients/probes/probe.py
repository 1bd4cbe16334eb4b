"""Runs the feature probes of one Python client and prints the outcomes as JSON.

Needs the standard library only, since a client may have a Python environment of its own.

A probe is a function without arguments that raises if the feature does not work, or returns the name of the
field by which the server refuses what its model cannot serve. It may be a coroutine function.
"""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

CHAT, EMBEDDINGS, RERANKER = "tiny-llama", "minilm", "tiny-reranker"
KEY = "unused"
SERVICE_CLASS = "interactive"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TEXTS = ["A queue forms where arrivals outpace service.", "Memory is what runs out first."]
DIMENSIONS = 384
FEW_TOKENS = 16
# A random model adds whitespace wherever a grammar admits it.
CALL_TOKENS = 800
# Closed and of one field, since a random model would add members without end.
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"type": "string", "enum": ["good", "bad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}
CHOICE = {"type": "function", "function": {"name": "mood"}}
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYPj/HwADAgH/"
    "p9Z8XQAAAABJRU5ErkJggg=="
)
IMAGE_PARTS: list[Any] = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": PIXEL}},
]


def url() -> str:
    """The server's address, without a path."""
    return sys.argv[1]


def check_mood(found: object) -> None:
    """Raises AssertionError unless `found` is an object of SCHEMA, or its JSON."""
    value = json.loads(found) if isinstance(found, str) else found
    assert isinstance(value, dict) and list(value) == ["mood"] and value["mood"] in ("good", "bad"), value


def check_vectors(rows: Any) -> None:
    """Raises AssertionError unless `rows` are one vector of unit length for each of TEXTS."""
    rows = [list(row) for row in rows]
    assert [len(row) for row in rows] == [DIMENSIONS] * len(TEXTS), [len(row) for row in rows]
    assert all(abs(sum(value * value for value in row) - 1) < 1e-3 for row in rows)


def check_ranks(indexes: Any, scores: Any) -> None:
    """Raises AssertionError unless every text is ranked once, by falling scores."""
    assert sorted(indexes) == list(range(len(TEXTS))), indexes
    assert list(scores) == sorted(scores, reverse=True), scores


def refused(call: Callable[[], object], error: type[Exception], field: Callable[[Any], Any]) -> Any:
    """`field` of the error of this class that `call` raises. Raises AssertionError if it raises none."""
    try:
        call()
    except error as found:
        return field(found)
    raise AssertionError("the server did not refuse the request")


def run(probes: dict[str, Callable[[], Any]]) -> None:
    """Runs the probes by feature and prints {"cells", "failures"} as the last line."""
    cells, failures = {}, {}
    for feature, probe in probes.items():
        try:
            outcome = probe()
            if inspect.isawaitable(outcome):
                outcome = asyncio.run(outcome)
            cells[feature] = "works" if outcome is None else str(outcome)
        except Exception:
            cells[feature], failures[feature] = "FAILS", traceback.format_exc()[-1500:]
    print("\n" + json.dumps({"cells": cells, "failures": failures}), flush=True)  # noqa: T201
