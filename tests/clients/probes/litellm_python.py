import re

import litellm
import probe

BASE = f"{probe.url()}/v1"
ASKED = {
    "model": f"hosted_vllm/{probe.CHAT}",
    "messages": probe.HELLO,
    "api_base": BASE,
    "api_key": probe.KEY,
}
TOOL = {"type": "function", "function": {"name": "mood", "parameters": probe.SCHEMA}}


def chat() -> None:
    headers = {"x-service-class": probe.SERVICE_CLASS}
    answer = litellm.completion(**ASKED, max_tokens=probe.FEW_TOKENS, extra_headers=headers)
    assert answer.choices[0].message.content and answer.usage.completion_tokens


def stream() -> None:
    chunks = list(litellm.completion(**ASKED, max_tokens=probe.FEW_TOKENS, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def tools() -> None:
    answer = litellm.completion(**ASKED, max_tokens=probe.CALL_TOKENS, tools=[TOOL], tool_choice=probe.CHOICE)
    call = answer.choices[0].message.tool_calls[0]
    probe.check_mood(call.function.arguments)


def structured() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "mood", "schema": probe.SCHEMA}}
    answer = litellm.completion(**ASKED, max_tokens=probe.CALL_TOKENS, response_format=schema)
    probe.check_mood(answer.choices[0].message.content)


def responses() -> None:
    answer = litellm.responses(
        model=f"openai/{probe.CHAT}",
        input="Hello",
        max_output_tokens=probe.FEW_TOKENS,
        api_base=BASE,
        api_key=probe.KEY,
    )
    assert answer.output[0].content[0].text


def embeddings() -> None:
    answer = litellm.embedding(
        model=f"hosted_vllm/{probe.EMBEDDINGS}", input=probe.TEXTS, api_base=BASE, api_key=probe.KEY
    )
    probe.check_vectors(row["embedding"] for row in answer.data)


def rerank() -> None:
    answer = litellm.rerank(
        model=f"hosted_vllm/{probe.RERANKER}",
        query="What is scarce?",
        documents=probe.TEXTS,
        api_base=probe.url(),
        api_key=probe.KEY,
    )
    rows = answer.results
    probe.check_ranks([row["index"] for row in rows], [row["relevance_score"] for row in rows])


def errors() -> None:
    asked = {**ASKED, "model": "hosted_vllm/nobody", "num_retries": 0}
    assert "nobody" in probe.refused(lambda: litellm.completion(**asked), litellm.NotFoundError, str)


def image() -> str:
    messages = [{"role": "user", "content": probe.IMAGE_PARTS}]
    return probe.refused(
        lambda: litellm.completion(**{**ASKED, "messages": messages}),
        litellm.BadRequestError,
        # The exception has no field of its own; its text holds the server's message, which begins with it.
        lambda error: re.search(r"messages\[\S+?(?=:)", str(error)).group(),
    )


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
