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


probe.run(
    {
        "tools": lambda: ask(instructor.Mode.TOOLS),
        "structured output": lambda: ask(instructor.Mode.JSON_SCHEMA),
    },
)
