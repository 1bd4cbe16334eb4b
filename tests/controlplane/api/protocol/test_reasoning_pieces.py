"""The pieces of a turn's reasoning are joined once, since a body may have thousands of them."""

from typing import Any

import pytest

from controlplane.api.protocol.anthropic_messages import MessagesRequest, _chat_messages
from controlplane.api.protocol.responses_items import messages_of


class Piece(str):
    """A text that is never the right side of `+`, which copies both sides."""

    def __radd__(self, other: str) -> str:
        pytest.fail("what came before is copied for each piece")


def test_reasoning_items_are_joined_once():
    said = {"type": "message", "role": "assistant", "content": "x"}
    items: list[Any] = [{"type": "reasoning", "content": Piece(letter)} for letter in "abc"]
    asked = {"type": "message", "role": "user", "content": "y"}
    assert list(messages_of([*items, said, said, asked, *items])) == [
        {"role": "assistant", "content": [{"type": "text", "text": "x"}] * 2, "reasoning": "abc"},
        {"role": "user", "content": "y"},
        {"role": "assistant", "content": None, "reasoning": "abc"},
    ]


def test_thinking_blocks_are_joined_once():
    blocks: list[Any] = [{"type": "thinking", "thinking": Piece(letter)} for letter in "abc"]
    made = list(_chat_messages("messages[0]", {"role": "assistant", "content": blocks}))
    assert made == [{"role": "assistant", "content": None, "reasoning": "abc"}]


def test_a_turn_of_thinking_and_calls_keeps_both():
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    thoughts = [{"type": "thinking", "thinking": text} for text in ("a", "b")]
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [*thoughts, call]}]
    body = MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": turns})
    made = body.chat_messages[1]
    assert made["reasoning"] == "ab"
    assert [one["id"] for one in made["tool_calls"]] == ["c"]
