from typing import Literal

import agents
import openai
import probe
from pydantic import BaseModel, ConfigDict

agents.set_tracing_disabled(True)


class Mood(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]


def agent(max_tokens: int = probe.FEW_TOKENS, **options: object) -> agents.Agent:
    client = openai.AsyncOpenAI(base_url=f"{probe.url()}/v1", api_key=probe.KEY, max_retries=0)
    kind = options.pop("kind", agents.OpenAIResponsesModel)
    model = kind(options.pop("model", probe.CHAT), openai_client=client)
    settings = agents.ModelSettings(max_tokens=max_tokens, tool_choice=options.pop("tool_choice", None))
    return agents.Agent(name="probe", model=model, model_settings=settings, **options)


@agents.function_tool
def note(mood: Literal["good", "bad"]) -> str:
    """Notes a mood."""
    return f"noted {mood}"


async def structured(**options: object) -> None:
    # A model of random weights ends at the limit, which openai-agents reports as an incomplete response.
    asked = agent(output_type=Mood, max_tokens=probe.CALL_TOKENS, **options)
    result = await agents.Runner.run(asked, "Hello")
    assert result.final_output.mood in ("good", "bad")


async def chat() -> None:
    await structured(kind=agents.OpenAIChatCompletionsModel)


async def stream() -> None:
    result = agents.Runner.run_streamed(agent(output_type=Mood, max_tokens=probe.CALL_TOKENS), "Hello")
    kinds = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in kinds and result.final_output.mood in ("good", "bad")


async def tools() -> None:
    options = {"tools": [note], "tool_use_behavior": "stop_on_first_tool", "tool_choice": "note"}
    result = await agents.Runner.run(agent(max_tokens=probe.CALL_TOKENS, **options), "Hello")
    assert result.final_output in ("noted good", "noted bad")


async def errors() -> None:
    try:
        await agents.Runner.run(agent(model="nobody"), "Hello")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("an unknown model was served")


async def image() -> str:
    parts = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": probe.PIXEL, "detail": "auto"},
    ]
    try:
        await agents.Runner.run(agent(), [{"role": "user", "content": parts}])
    except openai.BadRequestError as error:
        return str(error.param)
    raise AssertionError("the server did not refuse the image")


probe.run(
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "structured output": structured,
        "responses": structured,
        "errors": errors,
        "images": image,
    },
)
