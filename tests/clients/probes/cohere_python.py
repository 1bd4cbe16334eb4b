import cohere
import probe

client = cohere.ClientV2(api_key=probe.KEY, base_url=probe.url())
TOOL = {"type": "function", "function": {"name": "mood", "parameters": probe.SCHEMA}}
HEADERS = {"additional_headers": {"x-service-class": probe.SERVICE_CLASS}}
TEXT = "Hello, hello."


def chat() -> None:
    answer = client.chat(
        model=probe.CHAT, messages=probe.HELLO, max_tokens=probe.FEW_TOKENS, request_options=HEADERS
    )
    assert answer.message.content[0].text and answer.usage.tokens.output_tokens


def stream() -> None:
    text, last = "", None
    for event in client.chat_stream(
        model=probe.CHAT, messages=probe.HELLO, max_tokens=probe.FEW_TOKENS, request_options=HEADERS
    ):
        if event.type == "content-delta":
            text += event.delta.message.content.text
        last = event
    assert text and last.type == "message-end"
    assert last.delta.finish_reason in ("COMPLETE", "MAX_TOKENS") and last.delta.usage.tokens.output_tokens


def tools() -> None:
    asked = {
        "model": probe.CHAT,
        "messages": probe.HELLO,
        "max_tokens": probe.CALL_TOKENS,
        "tools": [TOOL],
        "tool_choice": "REQUIRED",
    }
    answer = client.chat(**asked)
    # A random model may call more than once, and the limit of tokens may cut the last call.
    call = answer.message.tool_calls[0]
    assert call.function.name == "mood"
    probe.check_mood(call.function.arguments)
    arguments = ""
    for event in client.chat_stream(**asked):
        if event.type == "tool-call-delta" and event.index == 0:
            arguments += event.delta.message.tool_calls.function.arguments
    probe.check_mood(arguments)
    history = [
        *probe.HELLO,
        {"role": "assistant", "tool_calls": [call], "tool_plan": answer.message.tool_plan},
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": [{"type": "document", "document": {"data": '{"mood": "good"}'}}],
        },
    ]
    second = client.chat(model=probe.CHAT, messages=history, max_tokens=probe.FEW_TOKENS, tools=[TOOL])
    assert second.usage.tokens.input_tokens > answer.usage.tokens.input_tokens


def structured() -> None:
    answer = client.chat(
        model=probe.CHAT,
        messages=probe.HELLO,
        max_tokens=probe.CALL_TOKENS,
        response_format={"type": "json_object", "json_schema": probe.SCHEMA},
    )
    probe.check_mood(answer.message.content[0].text)


def embeddings() -> None:
    answer = client.embed(
        model=probe.EMBEDDINGS,
        texts=probe.TEXTS,
        input_type="search_document",
        embedding_types=["float", "base64"],
    )
    probe.check_vectors(answer.embeddings.float_)
    assert len(answer.embeddings.base64) == len(answer.texts) and answer.meta.billed_units.input_tokens


def rerank() -> None:
    answer = client.rerank(model=probe.RERANKER, query="What is scarce?", documents=probe.TEXTS)
    probe.check_ranks([row.index for row in answer.results], [row.relevance_score for row in answer.results])


def tokens() -> None:
    # By default the client looks for a tokenizer to download and asks the server if there is none.
    found = client.tokenize(model=probe.CHAT, text=TEXT)
    assert found.tokens and len(found.tokens) == len(found.token_strings)
    assert client.detokenize(model=probe.CHAT, tokens=found.tokens).text == TEXT


def models() -> None:
    assert {model.name for model in client.models.list(endpoint="chat").models} == {probe.CHAT}
    assert client.models.get(probe.EMBEDDINGS).endpoints == ["embed"]


def errors() -> None:
    for call in (
        lambda: client.rerank(model="nobody", query="What?", documents=probe.TEXTS),
        lambda: client.chat(model="nobody", messages=probe.HELLO),
    ):
        body = probe.refused(call, cohere.NotFoundError, lambda error: error.body)
        assert "nobody" in body["message"] and body["error"]["code"] == "model_not_found"


def image() -> str:
    messages = [{"role": "user", "content": probe.IMAGE_PARTS}]
    return probe.refused(
        lambda: client.chat(model=probe.CHAT, messages=messages, max_tokens=1),
        cohere.BadRequestError,
        lambda error: error.body["error"]["param"],
    )


probe.run(
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "structured output": structured,
        "embeddings": embeddings,
        "rerank": rerank,
        "tokens": tokens,
        "models": models,
        "errors": errors,
        "images": image,
    },
)
