from typing import Literal

import openai
import probe
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel, ConfigDict

BASE = {"api_base": f"{probe.url()}/v1", "api_key": probe.KEY}


class Mood(BaseModel):
    """The mood of a text."""

    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]


def model(max_tokens: int = probe.FEW_TOKENS, name: str = probe.CHAT, **options: object) -> OpenAILike:
    kind = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048}
    # At LlamaIndex's default of 0.1 a model of random weights repeats whitespace up to the limit.
    kind["temperature"] = 1.0
    return OpenAILike(model=name, max_tokens=max_tokens, max_retries=0, **BASE, **kind, **options)


def chat() -> None:
    headers = {"x-service-class": probe.SERVICE_CLASS}
    assert model(default_headers=headers).chat([ChatMessage("Hello")]).message.content


def stream() -> None:
    assert "".join(part.delta or "" for part in model().stream_chat([ChatMessage("Hello")]))


async def tools() -> None:
    seen: list[str] = []

    def note(mood: Literal["good", "bad"]) -> str:
        """Notes a mood."""
        seen.append(mood)
        return "noted"

    # The first turn must call; the second is random text up to the limit.
    agent = FunctionAgent(tools=[note], llm=model(probe.CALL_TOKENS), initial_tool_choice="note")
    answer = await agent.run("Hello")
    assert str(answer) and seen and set(seen) <= {"good", "bad"}


def structured() -> None:
    llm = model(probe.CALL_TOKENS, should_use_structured_outputs=True)
    found = llm.as_structured_llm(Mood).complete("Hello").raw
    assert found.mood in ("good", "bad")


def responses() -> None:
    options = {"max_output_tokens": probe.FEW_TOKENS, "context_window": 2048, "max_retries": 0}
    assert OpenAILikeResponses(model=probe.CHAT, **BASE, **options).complete("Hello").text


def embeddings() -> None:
    embedder = OpenAILikeEmbedding(model_name=probe.EMBEDDINGS, **BASE)
    probe.check_vectors(embedder.get_text_embedding_batch(probe.TEXTS))


def rerank() -> None:
    from llama_index.postprocessor.cohere_rerank import CohereRerank

    ranker = CohereRerank(model=probe.RERANKER, api_key=probe.KEY, base_url=probe.url(), top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(at))) for at, text in enumerate(probe.TEXTS)]
    found = ranker.postprocess_nodes(nodes, query_str="What is scarce?")
    probe.check_ranks([int(one.node.id_) for one in found], [one.score for one in found])


def errors() -> None:
    wrong, hello = model(name="nobody"), [ChatMessage("Hello")]
    code = probe.refused(lambda: wrong.chat(hello), openai.NotFoundError, lambda error: error.code)
    assert code == "model_not_found"


def image() -> str:
    asked = ChatMessage(blocks=[TextBlock(text="What is this?"), ImageBlock(url=probe.PIXEL)])
    return probe.refused(lambda: model().chat([asked]), openai.BadRequestError, lambda error: error.param)


probe.run(
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "structured output": structured,
        "responses": responses,
        "embeddings": embeddings,
        "rerank": rerank,
        "errors": errors,
        "images": image,
    },
)
