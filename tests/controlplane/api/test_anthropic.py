"""/v1/messages through Anthropic's client, unmodified; events, mapping and refusals on the wire."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import orjson
import pytest

from controlplane.api.anthropic import MessageEncoder
from controlplane.api.openai.buffered import UsageCounter
from controlplane.api.openai.chat import ShownParts
from controlplane.api.settings import ApiSettings, BodyLimits
from controlplane.core.generation import Delta
from tests.controlplane.api.example_bodies import CALLING, CALLS, SECRET, conversation
from tests.controlplane.api.scripted_server import CHAT_MODEL, HELLO, TEXT, Stage, listening, staged

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD: dict[str, Any] = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": CHAT_MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]} | fields


@pytest.fixture
async def client(locked: Stage) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        listening(locked.app) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key=SECRET, max_retries=0) as client,
    ):
        yield client


async def test_create(client: anthropic.AsyncAnthropic, locked: Stage):
    locked.generator.default = replace(HELLO, cached_tokens=2)
    message = await client.messages.create(**asked(system="Be short."))
    [block] = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason, message.role) == (TEXT, "end_turn", "assistant")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (9, 2)
    assert message.usage.output_tokens == 3


async def test_stream(client: anthropic.AsyncAnthropic, locked: Stage):
    locked.generator.default = CALLING
    async with client.messages.stream(**asked(tools=[ADD])) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert texts == ["Sure", "."]
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"a": 1}, {}]
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", 3)
    whole = await client.messages.create(**asked(tools=[ADD]))
    assert [block.to_dict() for block in whole.content] == [block.to_dict() for block in final.content]


async def test_tool_loop(client: anthropic.AsyncAnthropic, locked: Stage):
    locked.generator.upcoming.append(CALLING)
    history: list[Any] = [{"role": "user", "content": "1+1"}]
    first = await client.messages.create(**asked(messages=history, tools=[ADD], system="Add."))
    uses = [block for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": f"{use.input}"} for use in uses]
    history += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
    ]
    second = await client.messages.create(**asked(messages=history, tools=[ADD], system="Add."))
    assert second.stop_reason == "end_turn"

    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}

    def text(value: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": value}]

    chat, _ = conversation(locked)
    assert chat.messages == [
        {"role": "system", "content": text("Add.")},
        {"role": "user", "content": text("1+1")},
        {
            "role": "assistant",
            "reasoning": "Hm",
            "content": text("Sure."),
            "tool_calls": [call("call_1", '{"a":1}'), call("call_2", "{}")],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": text("{'a': 1}")},
        {"role": "tool", "tool_call_id": "call_2", "content": text("{}")},
        {"role": "user", "content": text("Go on.")},
    ]
    assert chat.tools == [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
    ]


async def test_blocks_are_taken_back_with_their_null_members(client: anthropic.AsyncAnthropic, locked: Stage):
    locked.generator.upcoming.append(CALLING)
    blocks = (await client.messages.create(**asked(tools=[ADD]))).model_dump()["content"]
    uses = [block for block in blocks if block["type"] == "tool_use"]
    assert all(None in use.values() for use in uses)
    result = {"type": "tool_result", "is_error": None, "content": None, "cache_control": None}
    history = [
        *asked()["messages"],
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result | {"tool_use_id": use["id"]} for use in uses]},
    ]
    tools = [ADD | {"description": None, "strict": None}]
    second = await client.messages.create(**asked(messages=history, tools=tools))
    assert second.stop_reason == "end_turn"
    chat, _ = conversation(locked)
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in chat.messages[1]["tool_calls"]] == ["call_1", "call_2"]


async def test_client_reads_the_id_of_answers_and_errors(client: anthropic.AsyncAnthropic):
    headers = {"x-request-id": "mine"}
    answer = await client.messages.with_raw_response.create(**asked(), extra_headers=headers)
    assert answer.request_id == "mine"
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.models.retrieve("nobody", extra_headers=headers)
    assert missing.value.request_id == "mine"


HEADER = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"


@pytest.mark.parametrize("has_own_block", [True, False])
async def test_prompt_does_not_depend_on_claude_codes_billing_header(stage: Stage, *, has_own_block: bool):
    for cch in ("aa01", "bb02"):
        header = HEADER % cch
        texts = [header, "Be short.", ""] if has_own_block else [f"{header}\n\nBe short."]
        system = [{"type": "text", "text": text} for text in texts]
        messages = [*asked()["messages"], {"role": "system", "content": header}]
        answer = await stage.http.post(PATH, json=asked(system=system, messages=messages))
        assert answer.status_code == 200, answer.text
        chat, _ = conversation(stage)
        assert [(message["role"], message["content"][0]["text"]) for message in chat.messages] == [
            ("system", "Be short."),
            ("user", "hi"),
        ]
        assert len(chat.messages[0]["content"]) == 1
    bare = asked(system=HEADER % "cc03")
    assert (await stage.http.post(PATH, json=bare)).status_code == 200
    assert [message["role"] for message in conversation(stage)[0].messages] == ["user"]
    quoted = asked(messages=[{"role": "user", "content": HEADER}])
    assert (await stage.http.post(PATH, json=quoted)).status_code == 200
    assert conversation(stage)[0].messages[0]["content"][0]["text"] == HEADER


async def test_system_messages_may_be_merged_as_in_no_other_protocol(stage: Stage):
    messages = [*asked()["messages"], {"role": "system", "content": "Be short."}]
    for path, expected in ((PATH, True), ("/v1/chat/completions", False)):
        assert (await stage.http.post(path, json=asked(messages=messages))).status_code == 200
        assert conversation(stage)[0].can_merge_system == expected


async def test_count_tokens(client: anthropic.AsyncAnthropic):
    messages: Any = [{"role": "user", "content": "hi"}]
    counted = await client.messages.count_tokens(model=CHAT_MODEL, messages=messages, system="Be short.")
    message = await client.messages.create(**asked(system="Be short."))
    assert counted.input_tokens == message.usage.input_tokens == 11


async def test_models(client: anthropic.AsyncAnthropic):
    found = [model async for model in client.models.list()]
    assert [model.id for model in found] == [CHAT_MODEL]
    assert (await client.models.retrieve(CHAT_MODEL)) == found[0]
    assert (found[0].display_name, found[0].max_input_tokens, found[0].lifecycle) == (
        CHAT_MODEL,
        256,
        "active",
    )
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.models.retrieve("nobody")
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()


async def test_options_become_those_of_chat(client: anthropic.AsyncAnthropic, locked: Stage):
    await client.messages.create(
        **asked(stop_sequences=["END"], metadata={"user_id": "u"}),
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
        thinking={"type": "disabled"},
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        extra_headers={"x-service-class": "standard"},
    )
    chat, sampling = conversation(locked)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.stop, sampling.max_tokens) == (("END",), 20)
    assert sampling.structure == {"type": "json_schema", "schema": SCHEMA}
    assert chat.template_options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
async def test_tool_choice(
    client: anthropic.AsyncAnthropic, locked: Stage, choice: dict[str, Any], expected: object
):
    await client.messages.create(**asked(tools=[ADD], tool_choice=choice))
    assert conversation(locked)[0].tool_choice == expected


async def test_parallel_use_can_be_disabled(client: anthropic.AsyncAnthropic, locked: Stage):
    locked.generator.default = CALLING
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = await client.messages.create(**asked(tools=[ADD], tool_choice=choice))
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]


async def test_last_message_of_the_assistant_is_continued(client: anthropic.AsyncAnthropic, locked: Stage):
    history = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "The sum is"}]
    await client.messages.create(**asked(messages=history))
    options = conversation(locked)[0].template_options
    assert options == {"continue_final_message": True, "add_generation_prompt": False}


async def test_stop_reasons(client: anthropic.AsyncAnthropic, locked: Stage):
    message = await client.messages.create(**asked(max_tokens=2))
    assert message.stop_reason == "max_tokens"
    cut = ({**CALLS[0], "function": {"name": "add", "arguments": '{"a": '}},)
    locked.generator.default = replace(CALLING, tool_calls=cut)
    message = await client.messages.create(**asked(tools=[ADD]))
    assert message.content[-1].input == {"INVALID_JSON": '{"a": '}


@pytest.mark.parametrize(
    ("calls", "reason"),
    [((), "stop_sequence"), (CALLS[:1], "stop_sequence"), (CALLS[:2], "tool_use"), (CALLS, "tool_use")],
)
def test_stop_sequence_is_named_unless_all_calls_are_complete(calls: tuple[Any, ...], reason: str):
    shown = ShownParts(has_logprobs=False, is_single_call=False, hides_reasoning=False)
    encoder = MessageEncoder("m", "model", shown, UsageCounter(1, n=1))
    end = "tool_calls" if calls else "stop"
    encoder.encode(Delta(0, "a", (1,), finish_reason=end, stop_reason="END", tool_calls=calls))
    sequence = "END" if reason == "stop_sequence" else None
    ending = orjson.dumps({"stop_reason": reason, "stop_sequence": sequence})
    assert ending in encoder.end()
    assert orjson.dumps(encoder.answer()).count(ending[1:-1]) == 1


async def test_events_are_in_anthropics_order(stage: Stage):
    stage.generator.default = CALLING
    answer = await stage.http.post(PATH, json=asked(stream=True, tools=[ADD]))
    blocks = [block.split("\n", 1) for block in answer.text.strip().split("\n\n")]
    found = [orjson.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in found]
    block = ("content_block_start", "content_block_delta", "content_block_stop")
    two_deltas = (*block[:2], *block[1:])
    assert [event["type"] for event in found] == [
        *("message_start", *block, *two_deltas, *two_deltas, *block),
        *("message_delta", "message_stop"),
    ]
    assert found[0]["message"]["usage"]["input_tokens"] == 2
    assert found[0]["message"]["stop_reason"] is None
    kinds = [event["delta"]["type"] for event in found if event["type"] == "content_block_delta"]
    assert kinds == ["thinking_delta", *["text_delta"] * 2, *["input_json_delta"] * 3]


async def test_stream_that_fails_raises(client: anthropic.AsyncAnthropic, locked: Stage):
    locked.generator.default = replace(HELLO, request_fails_after=2)
    with pytest.raises(anthropic.APIStatusError, match="the model's engine failed"):
        async with client.messages.stream(**asked()) as stream:
            _ = [text async for text in stream.text_stream]


async def test_errors_have_anthropics_types(client: anthropic.AsyncAnthropic, locked: Stage):
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(**asked(model="nobody"))
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="wrong").messages.create(**asked())
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(**asked(extra_body={"wish": 1}))
    assert refused.value.body["error"]["param"] == "wish"
    locked.generator.upcoming.append(replace(HELLO, engine_fails_after=0))
    with pytest.raises(anthropic.APIStatusError) as down:
        await client.messages.create(**asked())
    assert (down.value.status_code, down.value.body["error"]["type"]) == (503, "overloaded_error")


KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}


@pytest.mark.parametrize("edits", [[KEEP_ALL], []])
async def test_what_claude_code_cannot_leave_out_is_accepted(stage: Stage, edits: list[Any]):
    tools = [ADD | {"defer_loading": False, "allowed_callers": ["direct"]}]
    fields = {"context_management": {"edits": edits}, "thinking": {"type": "adaptive"}, "tools": tools}
    fields["speed"] = "standard"
    others = {"diagnostics": {"previous_message_id": None}, "max_tokens": 20}
    counted = {name: value for name, value in asked(**fields).items() if name != "max_tokens"}
    for path, sent in ((PATH, counted | others), (COUNT, counted)):
        answer = await stage.http.post(path, json=sent)
        assert answer.status_code == 200, answer.text
    chat, _ = conversation(stage)
    assert [set(tool["function"]) for tool in chat.tools] == [{"name", "description", "parameters"}]


async def test_omitted_thinking_has_no_block(client: anthropic.AsyncAnthropic, locked: Stage):
    locked.generator.default = CALLING
    body = asked(tools=[ADD], thinking={"type": "adaptive", "display": "omitted"})
    whole = await client.messages.create(**body)
    async with client.messages.stream(**body) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    chat, _ = conversation(locked)
    assert chat.template_options["enable_thinking"] is True


async def test_errors_outside_the_endpoint_have_the_same_shape():
    async with staged(ApiSettings(limits=BodyLimits(max_body=1_000))) as stage:
        large = await stage.http.post(PATH, content=b"x" * 2_000)
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        wrong = await stage.http.get(PATH)
        assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
        other = await stage.http.post("/v1/messages_of_others", json={})
        assert "type" not in other.json()
