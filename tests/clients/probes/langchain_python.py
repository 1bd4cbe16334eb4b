import langchain_openai
import openai
import probe

BASE = {"base_url": f"{probe.url()}/v1", "api_key": probe.KEY}


def model(max_tokens: int = probe.FEW_TOKENS, **options: object) -> langchain_openai.ChatOpenAI:
    return langchain_openai.ChatOpenAI(
        **BASE, model=probe.CHAT, max_tokens=max_tokens, max_retries=0, **options
    )


def chat() -> None:
    answer = model(default_headers={"x-service-class": probe.SERVICE_CLASS}).invoke("Hello")
    assert answer.text and answer.usage_metadata["output_tokens"]


def stream() -> None:
    assert "".join(chunk.text for chunk in model().stream("Hello"))


def tools() -> None:
    schema = {"title": "mood", "description": "The mood of a text.", **probe.SCHEMA}
    probe.check_mood(
        model(probe.CALL_TOKENS).with_structured_output(schema, method="function_calling").invoke("Hello")
    )


def structured() -> None:
    schema = {"title": "mood", **probe.SCHEMA}
    probe.check_mood(
        model(probe.CALL_TOKENS).with_structured_output(schema, method="json_schema").invoke("Hello")
    )


def responses() -> None:
    assert model(use_responses_api=True).invoke("Hello").text


def embeddings() -> None:
    # By default LangChain sends token ids of OpenAI's cl100k, which name other words here.
    embedder = langchain_openai.OpenAIEmbeddings(
        **BASE, model=probe.EMBEDDINGS, check_embedding_ctx_length=False
    )
    probe.check_vectors(embedder.embed_documents(probe.TEXTS))


def errors() -> None:
    wrong = langchain_openai.ChatOpenAI(**BASE, model="nobody", max_retries=0)
    code = probe.refused(lambda: wrong.invoke("Hello"), openai.NotFoundError, lambda error: error.code)
    assert code == "model_not_found"


def image() -> str:
    return probe.refused(
        lambda: model().invoke([{"role": "user", "content": probe.IMAGE_PARTS}]),
        openai.BadRequestError,
        lambda error: error.param,
    )


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
