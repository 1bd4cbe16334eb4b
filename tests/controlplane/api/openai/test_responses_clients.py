"""/v1/responses through OpenAI's client and openai-agents, unmodified, over a real socket."""

from collections.abc import AsyncIterator
from itertools import count

import openai
import pytest
from pydantic import BaseModel

from backends.testing.scripted import Script
from controlplane.core.generation import ChatPrompt
from tests.controlplane.api.scripted_server import CHAT_MODEL, HELLO, TEXT, Stage, listening

pytestmark = pytest.mark.long

agents = pytest.importorskip("agents")


class Sum(BaseModel):
    """A structured answer."""

    total: int


def calling(*arguments: str) -> Script:
    """An answer that calls `add` once for each of `arguments`, in two pieces each."""
    calls = []
    for index, text in enumerate(arguments):
        function = {"name": "add", "arguments": text[:3]}
        calls += [
            {"index": index, "id": f"call_{next(_numbers)}", "type": "function", "function": function},
            {"index": index, "function": {"arguments": text[3:]}},
        ]
    return Script(tokens=1, words=("",), tool_calls=tuple(calls))


_numbers = count()
SUM = Script(tokens=1, words=('{"total": 3}',))
TOOL = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        listening(stage.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def conversation(stage: Stage, turn: int) -> ChatPrompt:
    chat = stage.generator.runs[turn].chat
    assert chat is not None
    return chat


async def test_create(client: openai.AsyncOpenAI):
    reply = await client.responses.create(model=CHAT_MODEL, input="hi", instructions="Be short.")
    assert (reply.output_text, reply.status) == (TEXT, "completed")
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (11, 3)


async def test_created_stream(client: openai.AsyncOpenAI):
    stream = await client.responses.create(model=CHAT_MODEL, input="hi", stream=True)
    found = [event async for event in stream]
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == TEXT
    assert found[-1].type == "response.completed"
    assert found[-1].response.output_text == TEXT


async def test_stream_assembles_the_same_response(client: openai.AsyncOpenAI, stage: Stage):
    stage.generator.default = calling('{"a": 1}', '{"a": 2}')
    async with client.responses.stream(model=CHAT_MODEL, input="hi", tools=[TOOL]) as stream:
        snapshots = [e.snapshot async for e in stream if e.type == "response.function_call_arguments.delta"]
        final = await stream.get_final_response()
    assert snapshots == ['{"a', '{"a": 1}', '{"a', '{"a": 2}']
    assert [item.arguments for item in final.output] == ['{"a": 1}', '{"a": 2}']


async def test_parse(client: openai.AsyncOpenAI, stage: Stage):
    stage.generator.default = SUM
    reply = await client.responses.parse(model=CHAT_MODEL, input="1+2", text_format=Sum)
    assert reply.output_parsed == Sum(total=3)
    run = stage.generator.runs[0]
    assert run.sampling is not None and run.sampling.structure is not None
    assert run.sampling.structure["schema"]["properties"]["total"]["type"] == "integer"


async def test_tool_loop_with_the_output_sent_back(client: openai.AsyncOpenAI, stage: Stage):
    stage.generator.upcoming.append(calling('{"a": 1}'))
    first = await client.responses.create(model=CHAT_MODEL, input="1+2", tools=[TOOL], tool_choice="required")
    [call] = first.output
    history = [
        {"role": "user", "content": "1+2"},
        *(item.model_dump() for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]
    second = await client.responses.create(model=CHAT_MODEL, input=history, tools=[TOOL])
    assert second.output_text == TEXT
    assert [message["role"] for message in conversation(stage, 1).messages] == ["user", "assistant", "tool"]


async def test_stored_state_is_refused(client: openai.AsyncOpenAI):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=CHAT_MODEL, input="hi", previous_response_id="resp_1")
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "unsupported_parameter")


async def test_broken_stream_raises(client: openai.AsyncOpenAI, stage: Stage):
    stage.generator.default = Script(tokens=3, request_fails_after=2)
    stream = await client.responses.create(model=CHAT_MODEL, input="hi", stream=True)
    with pytest.raises(openai.APIError, match="the model's engine failed"):
        _ = [event async for event in stream]


@pytest.fixture
def adder(client: openai.AsyncOpenAI):
    """An agent with one tool and the numbers that it was called with."""
    agents.set_tracing_disabled(True)
    seen: list[int] = []

    @agents.function_tool
    def add(a: int) -> str:
        """Adds a number."""
        seen.append(a)
        return f"sum so far {sum(seen)}"

    model = agents.OpenAIResponsesModel(CHAT_MODEL, openai_client=client)
    return agents.Agent(name="adder", instructions="Add.", tools=[add], model=model), seen


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_agent_loops_over_tools(stage: Stage, adder, is_streamed: bool):  # noqa: FBT001
    agent, seen = adder
    thinking = calling('{"a": 1}', '{"a": 2}')
    stage.generator.upcoming += [
        Script(tokens=3, words=("",), reasoning_words=("I", " add"), tool_calls=thinking.tool_calls),
        calling('{"a": 4}'),
        HELLO,
    ]
    if is_streamed:
        result = agents.Runner.run_streamed(agent, "1+2+4")
        kinds = [event.type async for event in result.stream_events()]
        assert kinds.count("raw_response_event") > 10
    else:
        result = await agents.Runner.run(agent, "1+2+4")
    assert (result.final_output, seen) == (TEXT, [1, 2, 4])
    assert result.context_wrapper.usage.requests == 3
    last = conversation(stage, 2).messages
    assert [message["role"] for message in last] == [
        *("system", "user", "assistant", "tool", "tool"),
        *("assistant", "tool"),
    ]
    assert last[2]["reasoning"] == "I add"
    assert [message["content"] for message in last if message["role"] == "tool"] == [
        "sum so far 1",
        "sum so far 3",
        "sum so far 7",
    ]
    # The next turn of the user continues the same conversation.
    again = await agents.Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "Thanks"}])
    assert again.final_output == TEXT


async def test_agent_with_a_typed_output(client: openai.AsyncOpenAI, stage: Stage):
    stage.generator.upcoming += [SUM]
    agents.set_tracing_disabled(True)
    model = agents.OpenAIResponsesModel(CHAT_MODEL, openai_client=client)
    result = await agents.Runner.run(agents.Agent(name="a", model=model, output_type=Sum), "1+2")
    assert result.final_output == Sum(total=3)
