from typing import Literal

import instructor
import openai
import probe
from pydantic import BaseModel, ConfigDict


class Mood(BaseModel):
    """The mood of a text."""

    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]


plain = openai.OpenAI(base_url=f"{probe.url()}/v1", api_key=probe.KEY, max_retries=0)


def ask(mode: instructor.Mode) -> None:
    client = instructor.from_openai(plain, mode=mode)
    found = client.chat.completions.create(
        model=probe.CHAT,
        messages=probe.HELLO,
        response_model=Mood,
        max_tokens=probe.CALL_TOKENS,
        max_retries=0,
    )
    assert found.mood in ("good", "bad")


def chat() -> None:
    """A text instead of an object, through the same wrapper."""
    client = instructor.from_openai(plain)
    headers = {"x-service-class": probe.SERVICE_CLASS}
    found = client.chat.completions.create(
        model=probe.CHAT,
        messages=probe.HELLO,
        response_model=None,
        max_tokens=probe.FEW_TOKENS,
        extra_headers=headers,
    )
    assert found.choices[0].message.content and found.usage.completion_tokens


def stream() -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    parts = client.chat.completions.create_partial(
        model=probe.CHAT,
        messages=probe.HELLO,
        response_model=Mood,
        max_tokens=probe.CALL_TOKENS,
        max_retries=0,
    )
    assert list(parts)[-1].mood in ("good", "bad")


def errors() -> None:
    create = instructor.from_openai(plain).chat.completions.create
    code = probe.refused(
        lambda: create(model="nobody", messages=probe.HELLO, response_model=None, max_tokens=1),
        openai.NotFoundError,
        lambda error: error.code,
    )
    assert code == "model_not_found"


def image() -> str:
    create = instructor.from_openai(plain).chat.completions.create
    messages = [{"role": "user", "content": probe.IMAGE_PARTS}]
    return probe.refused(
        lambda: create(model=probe.CHAT, messages=messages, response_model=None, max_tokens=1),
        openai.BadRequestError,
        lambda error: error.param,
    )


probe.run(
    {
        "chat": chat,
        "stream": stream,
        "errors": errors,
        "tools": lambda: ask(instructor.Mode.TOOLS),
        "structured output": lambda: ask(instructor.Mode.JSON_SCHEMA),
        "responses": lambda: ask(instructor.Mode.RESPONSES_TOOLS),
        "images": image,
    },
)
