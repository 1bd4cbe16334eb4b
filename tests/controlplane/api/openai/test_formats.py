"""Conversion of deltas to OpenAI's choices, buffered and streamed."""

from typing import Any

import orjson
import pytest

from controlplane.api.openai.buffered import UsageCounter
from controlplane.api.openai.chat import ChatChoice, ChatChunkFormat, ShownParts
from controlplane.api.openai.completions import CompletionChoice, CompletionChunkFormat, EchoedPrompt
from controlplane.api.openai.logprobs import (
    CompletionLogprobs,
    chat_entries,
    response_entries,
)
from controlplane.api.openai.streaming import Envelope
from controlplane.api.protocol.requests import ChatCompletionRequest, CompletionRequest
from controlplane.core.generation import Delta, TokenLogprob

_CALLS = [
    Delta(0, "", (1,), tool_calls=({"index": 0, "id": "c1", "type": "function", "function": {"name": "f"}},)),
    Delta(0, "", (2,), tool_calls=({"index": 0, "function": {"arguments": '{"a"'}},)),
    Delta(0, "", (3,), tool_calls=({"index": 0, "function": {"arguments": ":1}"}},)),
    Delta(0, "", (4,), "tool_calls", tool_calls=({"index": 1, "id": "c2", "function": {"name": "g"}},)),
]


def asked(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return ChatCompletionRequest.model_validate_json(orjson.dumps(body))


def collected(*, is_single_call: bool) -> dict[str, Any]:
    choice = ChatChoice(ShownParts.of(asked(parallel_tool_calls=not is_single_call)))
    for delta in _CALLS:
        choice.add(delta)
    shown: dict[str, Any] = choice.to_json(0)
    return shown


def test_tool_calls_are_assembled():
    shown = collected(is_single_call=False)
    assert shown["message"]["content"] is None
    assert shown["message"]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
    ]
    assert shown["finish_reason"] == "tool_calls"


def test_without_parallel_calls_only_the_first_call_is_shown():
    assert [call["id"] for call in collected(is_single_call=True)["message"]["tool_calls"]] == ["c1"]
    form = ChatChunkFormat(ShownParts.of(asked(parallel_tool_calls=False)))
    shown: list[Any] = [form.choice(delta) for delta in _CALLS]
    assert [len(choice["delta"].get("tool_calls", ())) for choice in shown] == [1, 1, 1, 0]
    assert shown[-1]["finish_reason"] == "tool_calls"


_THOUGHT = (TokenLogprob("Hm", -0.5),)
_SAID = (TokenLogprob("Yes", -0.5),)
_THINKING = [
    Delta(0, "", (1,)),
    Delta(0, "", (2,), reasoning="Hm", logprobs=_THOUGHT),
    Delta(0, "Yes", (3, 4), reasoning=".", logprobs=_SAID),
    Delta(0, "!", (5,), "stop"),
]


def test_reasoning_is_separate_from_the_text():
    form, choice = ChatChunkFormat(ShownParts.of(asked())), ChatChoice(ShownParts.of(asked()))
    shown: list[Any] = [form.choice(delta) for delta in _THINKING]
    assert [chunk["delta"] for chunk in shown] == [
        {"role": "assistant", "content": ""},
        {"reasoning": "Hm"},
        {"reasoning": ".", "content": "Yes"},
        {"content": "!"},
    ]
    for delta in _THINKING:
        choice.add(delta)
    whole: Any = choice.to_json(0)
    said = {"role": "assistant", "content": "Yes!", "refusal": None, "reasoning": "Hm."}
    assert whole["message"] == said
    assert whole["finish_reason"] == "stop"


def test_content_is_null_with_reasoning_only():
    choice = ChatChoice(ShownParts.of(asked()))
    choice.add(Delta(0, "", (1,), "length", reasoning="Hm"))
    shown: Any = choice.to_json(0)
    assert (shown["message"]["content"], shown["message"]["reasoning"]) == (None, "Hm")


def test_hidden_reasoning_hides_its_logprobs():
    body = asked(include_reasoning=False, logprobs=True)
    form, choice = ChatChunkFormat(ShownParts.of(body)), ChatChoice(ShownParts.of(body))
    chunks: list[Any] = [form.choice(delta) for delta in _THINKING[:2]]
    assert [chunk["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {"content": ""}]
    assert [chunk["logprobs"]["content"] for chunk in chunks] == [[], []]
    for delta in _THINKING[:2]:
        choice.add(delta)
    shown: Any = choice.to_json(0)
    assert shown["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert shown["logprobs"]["content"] == []


def test_hidden_reasoning_hides_the_logprobs_of_a_text_that_the_parser_keeps_back():
    thought, maybe_end, end, first, said = (
        TokenLogprob(text, -0.5) for text in ("Hm", "</", "end", "Y", "es")
    )
    deltas = [
        Delta(0, "", (1,), reasoning="Hm", logprobs=(thought,)),
        Delta(0, "", (2,), logprobs=(maybe_end,)),
        Delta(1, "a", (2,), logprobs=(said,)),
        Delta(0, "", (3,), reasoning="</b", logprobs=(thought,)),
        Delta(0, "", (4,), reasoning=".", logprobs=(end,)),
        Delta(0, "", (5,), logprobs=(first,)),
        Delta(0, "Yes", (6,), logprobs=(said,)),
        Delta(0, "", (7,), "length", logprobs=(first,)),
    ]
    shown = ShownParts.of(asked(include_reasoning=False, logprobs=True, n=2))
    form, choice = ChatChunkFormat(shown), ChatChoice(shown)
    chunks: list[Any] = [form.choice(delta) for delta in deltas if delta.index == 0]
    for delta in deltas:
        if delta.index == 0:
            choice.add(delta)
    whole: Any = choice.to_json(0)
    entries = [chunk["logprobs"]["content"] for chunk in chunks]
    assert [*map(len, entries)] == [0, 0, 0, 0, 0, 2, 1]
    for content in ([entry for each in entries for entry in each], whole["logprobs"]["content"]):
        assert [orjson.loads(orjson.dumps(entry))["token"] for entry in content] == ["Y", "es", "Y"]
    assert len(form.choice(deltas[2])["logprobs"]["content"]) == 1


def test_each_choice_begins_with_its_role():
    form = ChatChunkFormat(ShownParts.of(asked(n=2)))
    deltas = [Delta(1, "b", (1,)), Delta(0, "a", (2,), "length"), Delta(1, "c", (3,), "stop")]
    shown: list[Any] = [form.choice(delta) for delta in deltas]
    assert [(choice["index"], choice["delta"].get("role")) for choice in shown] == [
        (1, "assistant"),
        (0, "assistant"),
        (1, None),
    ]


def test_choice_has_stop_reason():
    choice = ChatChoice(ShownParts.of(asked()))
    choice.add(Delta(0, "a", (1,)))
    choice.add(Delta(0, "", (2,), "stop", stop_reason="END"))
    shown = choice.to_json(0)
    assert (shown["finish_reason"], shown["stop_reason"]) == ("stop", "END")


@pytest.mark.parametrize(
    "form",
    [
        ChatChunkFormat(ShownParts.of(asked())),
        CompletionChunkFormat(CompletionRequest(model="m", prompt="p"), [EchoedPrompt()]),
    ],
)
def test_last_chunk_has_stop_reason(form: ChatChunkFormat | CompletionChunkFormat):
    begun, last = form.choice(Delta(0, "a", (1,))), form.choice(Delta(0, "", (2,), "stop", stop_reason="END"))
    assert "stop_reason" not in begun
    assert last is not None
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "END")


_PROBABLE = (
    TokenLogprob("é", -0.5, (("é", -0.5), ("e", -1.5))),
    # An incomplete character, and a log probability of minus infinity.
    TokenLogprob("\ufffd", float("-inf")),
)


def test_chat_logprobs():
    first, second = orjson.loads(orjson.dumps(chat_entries(_PROBABLE)))
    assert first == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            {"token": "e", "logprob": -1.5, "bytes": [101]},
        ],
    }
    assert (second["bytes"], second["logprob"]) == (None, -9999.0)


def test_response_logprobs_have_no_null_bytes():
    entries = orjson.loads(orjson.dumps(response_entries(_PROBABLE)))
    assert [entry["bytes"] for entry in entries] == [[195, 169], []]


def test_completion_logprobs():
    found = CompletionLogprobs(offset=3)
    found.add(_PROBABLE)
    assert orjson.loads(orjson.dumps(found.to_json())) == {
        "tokens": ["é", "\ufffd"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"é": -0.5, "e": -1.5}, {"\ufffd": -9999.0}],
        "text_offset": [3, 4],
    }


def test_the_alternatives_of_a_completion_are_encoded_before_its_end():
    choice = CompletionChoice(CompletionRequest(model="m", prompt="p", logprobs=1), EchoedPrompt())
    choice.add(Delta(0, "e", (1,), logprobs=_PROBABLE[:1]))
    shown: Any = choice.to_json(0)
    assert [type(alternatives) for alternatives in shown["logprobs"]["top_logprobs"]] == [orjson.Fragment]


def test_cached_tokens_are_counted_once_per_prompt():
    counter = UsageCounter(10, n=2)
    for index in range(4):
        counter.count(Delta(index, "a", (1, 2), cached_tokens=3))
    assert counter.usage() == {
        "prompt_tokens": 10,
        "completion_tokens": 8,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 6},
    }


def test_reasoning_tokens_of_all_choices_are_counted_up_to_the_end_of_the_reasoning():
    counter = UsageCounter(10, n=2, has_reasoning=True)
    assert counter.usage()["completion_tokens_details"] == {"reasoning_tokens": 0}
    for delta in (
        Delta(0, "", (1, 2), reasoning="Hm"),
        Delta(1, "", (1,), reasoning="Hm"),
        # A token whose text is incomplete.
        Delta(0, "", (3,)),
        Delta(0, "a", (4,), reasoning="m"),
        Delta(0, "b", (5,)),
        Delta(1, "b", (2, 3)),
    ):
        counter.count(delta)
    assert counter.usage() == {
        "prompt_tokens": 10,
        "completion_tokens": 8,
        "total_tokens": 18,
        "completion_tokens_details": {"reasoning_tokens": 5},
    }


def test_chunk_is_one_event_of_plain_json():
    envelope = Envelope({"id": "a", "object": "k", "created": 1, "model": "m\n"}, has_usage=True)
    event = envelope.choice({"index": 0})
    assert event.startswith(b"data: ")
    assert event.index(b"\n") == len(event) - 2
    assert orjson.loads(event[6:]) == {
        "id": "a",
        "object": "k",
        "created": 1,
        "model": "m\n",
        "choices": [{"index": 0}],
        "usage": None,
    }
    assert orjson.loads(envelope.usage({"x": 1})[6:])["usage"] == {"x": 1}


def test_text_offsets_count_tokens_while_text_is_buffered():
    body = CompletionRequest(model="m", prompt="p", logprobs=1)
    half, rest, end = (TokenLogprob(token, -1.0) for token in ("ab", "c", "d"))
    # "ab" may begin a stop string, so the text is held back until "c" arrives.
    deltas = [
        Delta(0, "", (1,), logprobs=(half,)),
        Delta(0, "abc", (2,), logprobs=(rest,)),
        Delta(0, "d", (3,), "stop", logprobs=(end,)),
    ]
    form, whole = CompletionChunkFormat(body, [EchoedPrompt()]), CompletionChoice(body, EchoedPrompt())
    found: list[Any] = [form.choice(delta) for delta in deltas]
    for delta in deltas:
        whole.add(delta)
    offsets = [offset for choice in found for offset in choice["logprobs"]["text_offset"]]
    shown: Any = whole.to_json(0)
    assert offsets == shown["logprobs"]["text_offset"] == [0, 2, 3]
