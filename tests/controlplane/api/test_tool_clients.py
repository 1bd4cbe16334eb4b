"""Frameworks that call tools, unmodified, on scripted answers; one that is not installed is skipped."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel

from backends.testing.scripted import Script
from controlplane.core.generation import ChatPrompt
from tests.controlplane.api.scripted_server import CHAT_MODEL, HELLO, TEXT, Stage, listening

pytestmark = pytest.mark.long


class Sum(BaseModel):
    """The sum of two numbers."""

    total: int


@pytest.fixture
async def url(stage: Stage) -> AsyncIterator[str]:
    async with listening(stage.app) as url:
        yield f"{url}/v1"


def calling(name: str, call_id: str = "call_1", **arguments: Any) -> Script:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"index": 0, "id": call_id, "type": "function", "function": function}
    return Script(tokens=1, words=("",), tool_calls=(call,))


def conversation(stage: Stage, turn: int = 0) -> ChatPrompt:
    chat = stage.generator.runs[turn].chat
    assert chat is not None
    return chat


def chosen(stage: Stage) -> object:
    """The tool choice of the first request; a function by name as that name."""
    choice = conversation(stage).tool_choice
    return choice if isinstance(choice, str) else choice["function"]["name"]


@pytest.mark.parametrize("uses_responses", [False, True])
async def test_langchain_structured_output(stage: Stage, url: str, uses_responses: bool):  # noqa: FBT001
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        base_url=url, api_key="none", model=CHAT_MODEL, use_responses_api=uses_responses
    )
    stage.generator.upcoming += [calling("Sum", total=3), Script(tokens=1, words=('{"total": 4}',))]
    by_call = model.with_structured_output(Sum, method="function_calling")
    assert await by_call.ainvoke("1+2") == Sum(total=3)
    assert chosen(stage) == "Sum"
    by_schema = model.with_structured_output(Sum, method="json_schema")
    assert await by_schema.ainvoke("1+3") == Sum(total=4)


@pytest.mark.parametrize("uses_responses", [False, True])
async def test_langchain_tools(stage: Stage, url: str, uses_responses: bool):  # noqa: FBT001
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    model = langchain_openai.ChatOpenAI(
        base_url=url, api_key="none", model=CHAT_MODEL, use_responses_api=uses_responses
    ).bind_tools([add])
    stage.generator.upcoming += [calling("add", a=1, b=2), HELLO]
    history: list[Any] = [HumanMessage("1+2")]
    chunks = [chunk async for chunk in model.astream(history)]
    asked = chunks[0]
    for chunk in chunks[1:]:
        asked += chunk
    [call] = asked.tool_calls
    assert (call["name"], call["args"], call["id"]) == ("add", {"a": 1, "b": 2}, "call_1")
    history += [asked, ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])]
    answer = await model.ainvoke(history)
    assert answer.text == TEXT
    assert [message["role"] for message in conversation(stage, 1).messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_pydantic_ai(stage: Stage, url: str, kind: str, is_streamed: bool):  # noqa: FBT001
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    model = getattr(models, kind)(CHAT_MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = pydantic_ai.Agent(model, output_type=Sum, instructions="Add.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    stage.generator.upcoming += [calling("add", a=1, b=2), calling("final_result", "call_2", total=3)]
    if is_streamed:
        async with agent.run_stream("1+2") as result:
            output = await result.get_output()
    else:
        output = (await agent.run("1+2")).output
    assert output == Sum(total=3)
    # The output is a tool of its own, so that every answer is a call.
    assert chosen(stage) == "required"
    assert [tool["function"]["name"] for tool in conversation(stage).tools] == ["add", "final_result"]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
async def test_instructor(stage: Stage, url: str, mode: str):
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    is_call = mode != "JSON_SCHEMA"
    stage.generator.default = (
        calling("Sum", total=3) if is_call else Script(tokens=1, words=('{"total": 3}',))
    )
    messages = [{"role": "user", "content": "1+2"}]
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as plain:
        client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
        found = await client.chat.completions.create(model=CHAT_MODEL, messages=messages, response_model=Sum)
    # A subclass with the raw answer.
    assert isinstance(found, Sum) and found.total == 3
    if is_call:
        assert chosen(stage) == "Sum"


async def test_llama_index_agent(stage: Stage, url: str):
    workflow = pytest.importorskip("llama_index.core.agent.workflow")
    openai_like = pytest.importorskip("llama_index.llms.openai_like")

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    llm = openai_like.OpenAILike(
        model=CHAT_MODEL, api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True
    )
    stage.generator.upcoming += [calling("add", a=1, b=2), calling("add", "call_2", a=3, b=4), HELLO]
    answer = await workflow.FunctionAgent(tools=[add], llm=llm).run("1+2+4")
    assert str(answer) == TEXT
    messages = conversation(stage, 2).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["3", "7"]


_VERCEL = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";

const [baseURL, name] = process.argv.slice(1);
const model = createOpenAICompatible({ name: "tandem", baseURL })(name);
const number = { type: "number" };
const properties = { a: number, b: number };
const inputSchema = ai.jsonSchema({ type: "object", properties, required: ["a", "b"] });
const add = ai.tool({ description: "Adds two numbers.", inputSchema, execute: async ({ a, b }) => a + b });
const asked = { model, prompt: "1+2+4", tools: { add }, stopWhen: ai.stepCountIs(5), maxRetries: 0 };
const answer = await ai.generateText(asked);
const results = answer.steps.flatMap((step) => step.toolResults.map((result) => result.output));
console.log(JSON.stringify([answer.text, results]));
"""
_NODE_FOLDER = os.environ.get("TANDEM_NODE_CLIENTS")


@pytest.mark.skipif(
    _NODE_FOLDER is None,
    reason="TANDEM_NODE_CLIENTS names no folder with the packages ai and @ai-sdk/openai-compatible",
)
async def test_vercel_ai_sdk(stage: Stage, url: str):
    stage.generator.upcoming += [calling("add", a=1, b=2), calling("add", "call_2", a=3, b=4), HELLO]
    node = await asyncio.create_subprocess_exec(
        "node", "--input-type=module", "-e", _VERCEL, url, CHAT_MODEL,
        cwd=_NODE_FOLDER, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    printed, _ = await node.communicate()
    assert json.loads(printed) == [TEXT, [3, 7]]
    roles = [message["role"] for message in conversation(stage, 2).messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]
