import openai
import probe

client = openai.OpenAI(base_url=f"{probe.url()}/v1", api_key=probe.KEY, max_retries=0)
TOOL = {"type": "function", "function": {"name": "mood", "parameters": probe.SCHEMA}}


def chat() -> None:
    answer = client.chat.completions.create(
        model=probe.CHAT,
        messages=probe.HELLO,
        max_tokens=probe.FEW_TOKENS,
        extra_headers={"x-service-class": probe.SERVICE_CLASS},
    )
    assert answer.choices[0].message.content and answer.usage.completion_tokens


def stream() -> None:
    options = {"include_usage": True}
    events = client.chat.completions.create(
        model=probe.CHAT,
        messages=probe.HELLO,
        max_tokens=probe.FEW_TOKENS,
        stream=True,
        stream_options=options,
    )
    chunks = list(events)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens


def tools() -> None:
    answer = client.chat.completions.create(
        model=probe.CHAT,
        messages=probe.HELLO,
        tools=[TOOL],
        tool_choice=probe.CHOICE,
        max_tokens=probe.CALL_TOKENS,
    )
    call = answer.choices[0].message.tool_calls[0]
    probe.check_mood(call.function.arguments)


def structured() -> None:
    answer = client.chat.completions.create(
        model=probe.CHAT,
        messages=probe.HELLO,
        max_tokens=probe.CALL_TOKENS,
        response_format={"type": "json_schema", "json_schema": {"name": "mood", "schema": probe.SCHEMA}},
    )
    probe.check_mood(answer.choices[0].message.content)


def responses() -> None:
    # Without a format a model of random weights ends at the limit, in the event `response.incomplete`.
    text = {"format": {"type": "json_schema", "name": "mood", "schema": probe.SCHEMA}}
    asked = {"model": probe.CHAT, "input": "Hello", "max_output_tokens": probe.CALL_TOKENS, "text": text}
    with client.responses.stream(**asked) as events:
        types = [event.type for event in events]
        answer = events.get_final_response()
    assert types[0] == "response.created"
    probe.check_mood(answer.output_text)


def embeddings() -> None:
    answer = client.embeddings.create(model=probe.EMBEDDINGS, input=probe.TEXTS)
    probe.check_vectors(row.embedding for row in answer.data)


def tokens() -> None:
    counted = client.responses.input_tokens.count(model=probe.CHAT, input="Hello")
    answer = client.responses.create(model=probe.CHAT, input="Hello", max_output_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens


def models() -> None:
    names = {model.id for model in client.models.list()}
    assert {probe.CHAT, probe.EMBEDDINGS, probe.RERANKER} <= names, names


def errors() -> None:
    code = probe.refused(
        lambda: client.chat.completions.create(model="nobody", messages=probe.HELLO),
        openai.NotFoundError,
        lambda error: error.code,
    )
    assert code == "model_not_found"


def image() -> str:
    messages = [{"role": "user", "content": probe.IMAGE_PARTS}]
    return probe.refused(
        lambda: client.chat.completions.create(model=probe.CHAT, messages=messages),
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
        "tokens": tokens,
        "models": models,
        "errors": errors,
        "images": image,
    },
)
