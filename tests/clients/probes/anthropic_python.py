import anthropic
import probe

client = anthropic.Anthropic(base_url=probe.url(), api_key=probe.KEY, max_retries=0)
TOOL = {"name": "mood", "input_schema": probe.SCHEMA}


def chat() -> None:
    answer = client.messages.create(
        model=probe.CHAT,
        messages=probe.HELLO,
        max_tokens=probe.FEW_TOKENS,
        extra_headers={"x-service-class": probe.SERVICE_CLASS},
    )
    assert answer.content[0].text and answer.usage.output_tokens


def stream() -> None:
    with client.messages.stream(
        model=probe.CHAT, messages=probe.HELLO, max_tokens=probe.FEW_TOKENS
    ) as events:
        text = "".join(events.text_stream)
        answer = events.get_final_message()
    assert text == answer.content[0].text and answer.usage.output_tokens


def tools() -> None:
    answer = client.messages.create(
        model=probe.CHAT,
        messages=probe.HELLO,
        max_tokens=probe.CALL_TOKENS,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "mood"},
    )
    block = answer.content[0]
    assert block.type == "tool_use"
    probe.check_mood(block.input)


def structured() -> None:
    answer = client.messages.create(
        model=probe.CHAT,
        messages=probe.HELLO,
        max_tokens=probe.CALL_TOKENS,
        output_config={"format": {"type": "json_schema", "schema": probe.SCHEMA}},
    )
    probe.check_mood(answer.content[0].text)


def tokens() -> None:
    counted = client.messages.count_tokens(model=probe.CHAT, messages=probe.HELLO)
    answer = client.messages.create(model=probe.CHAT, messages=probe.HELLO, max_tokens=1)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def models() -> None:
    assert probe.CHAT in {model.id for model in client.models.list()}
    assert client.models.retrieve(probe.CHAT).type == "model"


def errors() -> None:
    found = probe.refused(
        lambda: client.messages.create(model="nobody", messages=probe.HELLO, max_tokens=1),
        anthropic.NotFoundError,
        lambda error: error.body["error"]["type"],
    )
    assert found == "not_found_error"


def image() -> str:
    source = {"type": "base64", "media_type": "image/png", "data": probe.PIXEL.partition(",")[2]}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    return probe.refused(
        lambda: client.messages.create(model=probe.CHAT, messages=messages, max_tokens=1),
        anthropic.BadRequestError,
        lambda error: error.body["error"]["param"],
    )


probe.run(
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "structured output": structured,
        "tokens": tokens,
        "models": models,
        "errors": errors,
        "images": image,
    },
)
