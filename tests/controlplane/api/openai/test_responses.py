"""/v1/responses on the wire: events in OpenAI's order, the mapping onto chat, and refusals by name."""

from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest

from backends.testing.scripted import Script
from tests.controlplane.api.example_bodies import CALLS, conversation
from tests.controlplane.api.scripted_server import CHAT_MODEL, HELLO, TEXT, WORDS, Stage

PATH = "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
CALLING = Script(tokens=2, words=("Sure", "."), tool_calls=CALLS)
QUESTION = {"role": "user", "content": "hi"}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": CHAT_MODEL, "input": "hi"} | fields


async def answered(stage: Stage, **fields: Any) -> dict[str, Any]:
    answer = await stage.http.post(PATH, json=asked(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(stage: Stage, **fields: Any) -> list[dict[str, Any]]:
    answer = await stage.http.post(PATH, json=asked(stream=True, **fields))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-tandem-decision"] == "ADMIT"
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n", 1)
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_whole_response(stage: Stage):
    answer = await stage.http.post(PATH, json=asked(metadata={"a": "b"}), headers={"x-request-id": "mine"})
    body = answer.json()
    assert (body["id"], body["object"], body["status"], body["store"]) == (
        "resp_mine",
        "response",
        "completed",
        False,
    )
    part = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    assert body["output"] == [
        {
            "type": "message",
            "id": "msg_mine_0",
            "status": "completed",
            "role": "assistant",
            "content": [part],
        }
    ]
    assert body["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }
    assert (body["metadata"], body["error"], body["incomplete_details"]) == ({"a": "b"}, None, None)
    assert answer.headers["x-tandem-decision"] == "ADMIT"


async def test_events_of_reasoning_text_and_calls_are_in_openais_order(stage: Stage):
    stage.generator.default = replace(CALLING, tokens=3, reasoning_words=("Hm",))
    found = await streamed(stage, tools=[ADD])
    assert [event["type"].removeprefix("response.") for event in found] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["output_index"] for event in found if event["type"].endswith("item.added")] == [0, 1, 2, 3]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    final = found[-1]["response"]
    assert final["output"] == done
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call", "function_call"]
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "Hm"}]
    assert (done[2]["call_id"], done[2]["name"], done[2]["arguments"]) == ("call_1", "add", '{"a": 1}')
    assert final["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    assert found[0]["response"]["output"] == []
    assert found[0]["response"]["tools"] == [ADD | {"description": None}]


async def test_buffered_and_streamed_output_are_equal(stage: Stage):
    stage.generator.default = replace(CALLING, tokens=3, reasoning_words=("Hm",), cached_tokens=2)
    headers = {"x-request-id": "same"}
    whole = (await stage.http.post(PATH, json=asked(tools=[ADD]), headers=headers)).json()
    answer = await stage.http.post(PATH, json=asked(tools=[ADD], stream=True), headers=headers)
    last = orjson.loads(answer.text.strip().rsplit("data: ", 1)[1])["response"]
    times = ("created_at", "completed_at")
    assert {k: v for k, v in whole.items() if k not in times} == {
        k: v for k, v in last.items() if k not in times
    }
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 2


async def test_only_the_first_call_without_parallel_calls(stage: Stage):
    stage.generator.default = CALLING
    body = await answered(stage, tools=[ADD], parallel_tool_calls=False)
    assert [item["type"] for item in body["output"]] == ["message", "function_call"]


async def test_limit_of_tokens_makes_the_response_incomplete(stage: Stage):
    body = await answered(stage, max_output_tokens=2)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    last = (await streamed(stage, max_output_tokens=2))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")


async def test_log_probabilities(stage: Stage):
    include = ["message.output_text.logprobs"]
    body = await answered(stage, include=include, top_logprobs=1)
    logprobs = body["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == list(WORDS)
    assert logprobs[0]["top_logprobs"] == [{"token": "other0", "logprob": -1.0, "bytes": list(b"other0")}]
    found = await streamed(stage, include=include)
    deltas = [event["logprobs"][0]["token"] for event in found if event["type"].endswith("text.delta")]
    assert deltas == list(WORDS)


async def test_answer_without_text_has_an_empty_message(stage: Stage):
    stage.generator.default = Script(tokens=1, words=("",))
    body = await answered(stage)
    assert [item["content"][0]["text"] for item in body["output"]] == [""]


HISTORY = [
    {"role": "developer", "content": "Add."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+1"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Sure.", "annotations": [], "logprobs": []}],
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "add",
        "arguments": '{"a": 1}',
        "async_": None,
        "namespace": None,
    },
    {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}", "status": "completed"},
    {"type": "function_call_output", "call_id": "c1", "output": "2"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And then?"},
]


async def test_items_become_chat_messages(stage: Stage):
    await answered(stage, input=HISTORY, instructions="Be short.", tools=[ADD])

    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}

    def text(value: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": value}]

    chat, _ = conversation(stage)
    assert chat.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "developer", "content": "Add."},
        {"role": "user", "content": text("1+1")},
        {
            "role": "assistant",
            "reasoning": "Hm",
            "content": text("Sure."),
            "tool_calls": [call("c1", '{"a": 1}'), call("c2", "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": text("3")},
        {"role": "assistant", "content": text("2")},
        {"role": "user", "content": "And then?"},
    ]
    assert chat.tools == [
        {"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}
    ]
    assert chat.tool_choice == "auto"


async def test_options_become_those_of_chat(stage: Stage):
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    body = await answered(
        stage,
        text={"format": form},
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        reasoning={"effort": "none", "summary": "auto"},
        service_class="standard",
    )
    chat, sampling = conversation(stage)
    assert sampling.structure == {"type": "json_schema", "schema": schema}
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 7)
    assert chat.template_options == {"reasoning_effort": "none", "enable_thinking": False}
    assert body["text"]["format"] == form
    await answered(stage, text={"format": {"type": "json_object"}})
    assert conversation(stage)[1].structure == {"type": "json_object"}
    await answered(stage, tools=[ADD], tool_choice={"type": "function", "name": "add"})
    assert conversation(stage)[0].tool_choice == {"type": "function", "function": {"name": "add"}}


async def test_the_format_does_not_apply_to_a_named_call(stage: Stage):
    """instructor sends both for RESPONSES_TOOLS, and vLLM refuses two constraints."""
    form = {"type": "json_schema", "name": "f", "schema": {"type": "object"}}
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    body = {"model": CHAT_MODEL, "input": "hi", "text": {"format": form}, "tools": tools}
    for choice, structure in (
        ({"type": "function", "name": "f"}, None),
        ("auto", {"type": "json_schema", "schema": {"type": "object"}}),
    ):
        answer = await stage.http.post("/v1/responses", json=body | {"tool_choice": choice})
        assert answer.status_code == 200, answer.text
        assert conversation(stage)[1].structure == structure


async def test_what_codex_sends_is_accepted(stage: Stage):
    shell = {"type": "function", "name": "shell", "description": "Runs.", "strict": False}
    parts = [{"type": "input_text", "text": "List the files."}]
    await answered(
        stage,
        instructions="Be brief.",
        input=[{"type": "message", "role": role, "content": parts} for role in ("developer", "user")],
        tools=[shell | {"parameters": PARAMETERS}],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto", "context": "all_turns"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="9f",
        client_metadata={"x-codex-installation-id": "9f"},
    )
    chat, _ = conversation(stage)
    assert [message["role"] for message in chat.messages] == ["system", "developer", "user"]


async def test_stream_that_fails_ends_with_an_error_event(stage: Stage):
    stage.generator.default = replace(HELLO, request_fails_after=2)
    last = (await streamed(stage))[-1]
    assert (last["type"], last["code"], last["error"]["type"]) == ("error", "backend_failed", "server_error")


async def test_failure_before_the_first_token_is_an_http_error(stage: Stage):
    stage.generator.default = replace(HELLO, request_fails_after=0)
    answer = await stage.http.post(PATH, json=asked(stream=True))
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "backend_failed")


def item(**fields: Any) -> dict[str, Any]:
    return asked(input=[fields])


ENDLESS = {"$ref": "#"}
REFUSED = [
    ({"model": CHAT_MODEL}, "input", "missing_required_parameter", "add it"),
    (asked(input=[]), "input", "invalid_value", "at least 1 item"),
    (asked(input=3), "input", "invalid_value", "a string or a list of items"),
    (asked(previous_response_id="resp_1"), "previous_response_id", "unsupported_parameter", "not stored"),
    (asked(conversation="c"), "conversation", "unsupported_parameter", "whole conversation"),
    (asked(store=True), "store", "invalid_value", "not stored; send false"),
    (asked(background=True), "background", "invalid_value", "leave it out"),
    (asked(prompt={"id": "p"}), "prompt", "invalid_value", "stored prompts"),
    (asked(truncation="auto"), "truncation", "invalid_value", "disabled"),
    (asked(tools=[{"type": "web_search"}]), "tools[0].type", "invalid_value", "built-in tools"),
    (asked(tools=[{"type": "mcp", "server_label": "x"}]), "tools[0].type", "invalid_value", "built-in tools"),
    (asked(tools=[ADD], tool_choice={"type": "file_search"}), "tool_choice", "invalid_value", "expected"),
    (asked(tool_choice="required"), "tool_choice", "invalid_value", "tools is empty"),
    (
        asked(tools=[ADD], tool_choice={"type": "function", "name": "sub"}),
        "tool_choice",
        "invalid_value",
        "not in tools",
    ),
    (
        asked(tools=[ADD | {"parameters": ENDLESS}]),
        "tools[0].parameters",
        "invalid_value",
        "tools[0].parameters",
    ),
    (
        asked(text={"format": {"type": "json_schema", "name": "n", "schema": ENDLESS}}),
        "text.format.schema",
        "invalid_value",
        "text.format.schema",
    ),
    (
        asked(text={"format": {"type": "json_schema"}}),
        "text.format",
        "invalid_value",
        "needs name and schema",
    ),
    (asked(text={"verbosity": "low"}), "text.verbosity", "invalid_value", "medium"),
    (asked(messages=[]), "messages", "unknown_parameter", "unknown field; remove it"),
    (asked(input_text="x"), "input_text", "unknown_parameter", "did you mean input"),
    (item(type="item_reference", id="x"), "input[0].type", "invalid_value", "stored state"),
    (item(type="web_search_call"), "input[0].type", "invalid_value", "built-in tools"),
    (item(content="x"), "input[0].role", "invalid_value", "add it"),
    (item(role="user"), "input[0].content", "invalid_value", "add it"),
    (item(role="robot", content="x"), "input[0].role", "invalid_value", "'system'"),
    (
        item(role="user", content=[{"type": "input_file", "file_id": "f"}]),
        "input[0].content",
        "invalid_value",
        "part 0 is of type input_file; only text and images are passed on to a model",
    ),
    (
        item(role="user", content=[{"type": "input_image", "image_url": "data:"}]),
        "input[0].content[0]",
        "invalid_value",
        "is an image; only text is passed on to chat-model",
    ),
    (
        item(role="user", content=[{"type": "input_image", "file_id": None}]),
        "input[0].content[0].image_url",
        "invalid_value",
        "add the image's data URL",
    ),
    (
        item(type="function_call_output", call_id="c", output="1"),
        "input[0].call_id",
        "invalid_value",
        "earlier",
    ),
    (item(type="function_call", call_id="c", name="add"), "input[0].arguments", "invalid_value", "add it"),
    (asked(max_output_tokens=0), "max_output_tokens", "invalid_value", "greater than or equal to 1"),
    (asked(max_output_tokens=255), "input", "context_length_exceeded", "lower max_output_tokens"),
    (asked(input="x" * 300), "input", "context_length_exceeded", "characters"),
    (asked(metadata={"k": "v" * 513}), "metadata.k", "invalid_value", "at most 512"),
    (asked(model="nobody"), "model", "model_not_found", "nobody"),
]


@pytest.mark.parametrize(("body", "param", "code", "message"), REFUSED)
async def test_refusal_names_field_rule_and_remedy(
    stage: Stage, body: dict[str, Any], param: str, code: str, message: str
):
    answer: httpx.Response = await stage.http.post(PATH, json=body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert (error["param"], error["code"]) == (param, code), error
    assert message in error["message"]
    assert not stage.generator.runs
