"""Agent frameworks on vLLM with a tiny model: required calls are valid whatever its random weights prefer."""

from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
import yaml
from pydantic import BaseModel, ConfigDict

from backends.vllm.client import VllmGenerator
from backends.vllm.grammar_limits import GrammarLimits
from controlplane.api.app import create_app
from controlplane.config import parse
from controlplane.service.bootstrap import build_service
from tests.controlplane.api.scripted_server import listening
from tests.engines import TINY_ARGUMENTS

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

ROOT = Path(__file__).resolve().parent.parent
MODEL = "tandem/tiny-llama"


class Mood(BaseModel):
    """The mood of a text; closed, since a random model would add members without end."""

    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]


SCHEMA = Mood.model_json_schema()
# A random model likes whitespace, which the grammar of a call admits: at temperature 0 without end.
MOST_TOKENS = 800
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": MOST_TOKENS}
HI: list[Any] = [{"role": "user", "content": "How is it?"}]


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """The chat model of configs/dev.yaml behind the gate, on a socket."""
    dev = yaml.safe_load((ROOT / "configs/dev.yaml").read_text(encoding="utf-8"))["models"]["chat"]
    config = parse({"models": {"chat": {"model": MODEL}}, "scheduling": {"engine": {}}})
    generator = VllmGenerator(
        MODEL,
        engine_arguments=TINY_ARGUMENTS,
        tool_parser=dev["tool_parser"],
        scheduling=config.engine_options(),
        grammars=GrammarLimits(
            **{key.name: getattr(config.server.limits, key.name) for key in fields(GrammarLimits)}
        ),
    )
    service = build_service(config, [generator], [], workspace_bytes=0)
    await service.start()
    try:
        app = create_app(service)
        async with listening(app) as url:
            yield url
        assert not service.gate.tickets()
    finally:
        await service.stop()


async def test_required_calls_return_objects_that_follow_their_schema(url: str):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        await check_chat_and_responses(client)
        await check_agents(client)
    await check_langchain(f"{url}/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude:
        await check_messages(claude)


async def check_chat_and_responses(client: openai.AsyncOpenAI) -> None:
    function = {"name": "mood", "parameters": SCHEMA}
    chat = await client.chat.completions.create(
        **ASKED,
        messages=HI,
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "mood"}},
    )
    [call] = chat.choices[0].message.tool_calls
    Mood.model_validate_json(call.function.arguments)
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": HI,
        "max_output_tokens": MOST_TOKENS,
        "tools": [{"type": "function", **function}],
        "tool_choice": {"type": "function", "name": "mood"},
    }
    whole = await client.responses.create(**asked)
    [item] = whole.output
    assert (item.type, item.status) == ("function_call", "completed")
    Mood.model_validate_json(item.arguments)
    async with client.responses.stream(**asked) as stream:
        streamed = await stream.get_final_response()
    [item] = streamed.output
    Mood.model_validate_json(item.arguments)
    assert streamed.usage.input_tokens == whole.usage.input_tokens
    text = await client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, temperature=0)
    assert (text.status, text.usage.output_tokens) == ("incomplete", 8)
    parsed = await client.responses.parse(model=MODEL, input="Hello", text_format=Mood)
    assert parsed.output_parsed is not None


async def check_agents(client: openai.AsyncOpenAI) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    seen: list[str] = []

    @agents.function_tool
    def note(mood: Literal["good", "bad"]) -> str:
        """Notes a mood."""
        seen.append(mood)
        return "noted"

    agent = agents.Agent(
        name="noting",
        tools=[note],
        # The next turn would be random text up to the limit, which openai-agents takes for a failure.
        tool_use_behavior="stop_on_first_tool",
        model=agents.OpenAIResponsesModel(MODEL, openai_client=client),
        model_settings=agents.ModelSettings(tool_choice="note", max_tokens=MOST_TOKENS),
    )
    result = await agents.Runner.run(agent, "How is it?")
    assert result.final_output == "noted"
    assert len(seen) == 1 and seen[0] in ("good", "bad")


async def check_langchain(url: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(base_url=url, api_key="none", model=MODEL, max_tokens=MOST_TOKENS)
    found = await model.with_structured_output(Mood, method="function_calling").ainvoke("How is it?")
    assert isinstance(found, Mood)


async def check_messages(client: anthropic.AsyncAnthropic) -> None:
    asked: dict[str, Any] = {
        **ASKED,
        "messages": HI,
        "tools": [{"name": "mood", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "mood"},
    }
    whole = await client.messages.create(**asked)
    [block] = whole.content
    assert (block.type, whole.stop_reason) == ("tool_use", "tool_use")
    Mood.model_validate(block.input)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    Mood.model_validate(streamed.content[0].input)
    counted = await client.messages.count_tokens(model=MODEL, messages=HI, tools=asked["tools"])
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
