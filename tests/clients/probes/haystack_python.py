import openai
import probe
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent
from haystack.tools import Tool
from haystack.utils import Secret

BASE = {"api_base_url": f"{probe.url()}/v1", "api_key": Secret.from_token(probe.KEY)}
HELLO = [ChatMessage.from_user("Hello")]


def model(
    max_tokens: int = probe.FEW_TOKENS, name: str = probe.CHAT, **options: object
) -> OpenAIChatGenerator:
    sent = options.pop("generation_kwargs", {})
    return OpenAIChatGenerator(
        **BASE, model=name, max_retries=0, generation_kwargs={"max_tokens": max_tokens, **sent}, **options
    )


def chat() -> None:
    headers = {"extra_headers": {"x-service-class": probe.SERVICE_CLASS}}
    assert model(generation_kwargs=headers).run(HELLO)["replies"][0].text


def stream() -> None:
    parts: list[str] = []
    answer = model(streaming_callback=lambda chunk: parts.append(chunk.content)).run(HELLO)
    assert "".join(parts) == answer["replies"][0].text


def tools() -> None:
    tool = Tool("mood", "Notes a mood.", parameters=probe.SCHEMA, function=lambda mood: mood)
    generator = model(probe.CALL_TOKENS, tools=[tool], generation_kwargs={"tool_choice": probe.CHOICE})
    call = generator.run(HELLO)["replies"][0].tool_calls[0]
    probe.check_mood(call.arguments)


def structured() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "mood", "schema": probe.SCHEMA}}
    generator = model(probe.CALL_TOKENS, generation_kwargs={"response_format": schema})
    probe.check_mood(generator.run(HELLO)["replies"][0].text)


def responses() -> None:
    options = {"max_output_tokens": probe.FEW_TOKENS}
    generator = OpenAIResponsesChatGenerator(
        **BASE, model=probe.CHAT, max_retries=0, generation_kwargs=options
    )
    assert generator.run(HELLO)["replies"][0].text


def embeddings() -> None:
    embedder = OpenAIDocumentEmbedder(**BASE, model=probe.EMBEDDINGS, progress_bar=False)
    documents = embedder.run([Document(content=text) for text in probe.TEXTS])["documents"]
    probe.check_vectors(document.embedding for document in documents)


def rerank() -> None:
    from haystack_integrations.components.rankers.cohere import CohereRanker

    ranker = CohereRanker(
        model=probe.RERANKER, api_key=Secret.from_token(probe.KEY), api_base_url=probe.url()
    )
    documents = [Document(content=text, meta={"at": at}) for at, text in enumerate(probe.TEXTS)]
    found = ranker.run("What is scarce?", documents)["documents"]
    probe.check_ranks([one.meta["at"] for one in found], [one.score for one in found])


def errors() -> None:
    wrong = model(name="nobody")
    code = probe.refused(lambda: wrong.run(HELLO), openai.NotFoundError, lambda error: error.code)
    assert code == "model_not_found"


def image() -> str:
    shown = ImageContent(base64_image=probe.PIXEL.partition(",")[2], mime_type="image/png")
    asked = [ChatMessage.from_user(content_parts=["What is this?", shown])]
    return probe.refused(lambda: model().run(asked), openai.BadRequestError, lambda error: error.param)


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
