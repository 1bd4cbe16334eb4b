from typing import Literal

import probe
import pydantic_ai
from pydantic import BaseModel, ConfigDict
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Mood(BaseModel):
    """The mood of a text."""

    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]


def provider() -> OpenAIProvider:
    return OpenAIProvider(base_url=f"{probe.url()}/v1", api_key=probe.KEY)


def agent(max_tokens: int = probe.FEW_TOKENS, kind: type = OpenAIChatModel, **options: object) -> object:
    model = kind(options.pop("model", probe.CHAT), provider=provider())
    return pydantic_ai.Agent(model, model_settings={"max_tokens": max_tokens}, **options)


async def chat() -> None:
    assert (await agent().run("Hello")).output


async def stream() -> None:
    async with agent().run_stream("Hello") as result:
        assert "".join([text async for text in result.stream_text(delta=True)])


async def tools() -> None:
    # Without a native output the result is a tool, which the request requires.
    found = await agent(probe.CALL_TOKENS, output_type=pydantic_ai.ToolOutput(Mood)).run("Hello")
    assert found.output.mood in ("good", "bad")


async def structured() -> None:
    found = await agent(probe.CALL_TOKENS, output_type=pydantic_ai.NativeOutput(Mood)).run("Hello")
    assert found.output.mood in ("good", "bad")


async def responses() -> None:
    assert (await agent(kind=OpenAIResponsesModel).run("Hello")).output


async def embeddings() -> None:
    embedder = Embedder(OpenAIEmbeddingModel(probe.EMBEDDINGS, provider=provider()))
    probe.check_vectors((await embedder.embed_documents(probe.TEXTS)).embeddings)


async def errors() -> None:
    try:
        await agent(model="nobody").run("Hello")
    except pydantic_ai.exceptions.ModelHTTPError as error:
        assert error.status_code == 404
    else:
        raise AssertionError("an unknown model was served")


async def image() -> str:
    try:
        await agent().run(["What is this?", pydantic_ai.ImageUrl(probe.PIXEL)])
    except pydantic_ai.exceptions.ModelHTTPError as error:
        assert error.status_code == 400
        return error.body["param"]
    raise AssertionError("the server did not refuse the image")


probe.run(
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "structured output": structured,
        "responses": responses,
        "embeddings": embeddings,
        "errors": errors,
        "images": image,
    },
)
