from typing import Literal

import probe
from pydantic import BaseModel, ConfigDict

from controlplane import sdk

client = sdk.Tandem(probe.url())


class Mood(BaseModel):
    """The mood of a text."""

    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]


def chat() -> None:
    answer = client.chat(
        "Hello", model=probe.CHAT, max_tokens=probe.FEW_TOKENS, service_class=probe.SERVICE_CLASS
    )
    assert answer.text and answer.usage.completion_tokens


def stream() -> None:
    assert "".join(client.stream("Hello", model=probe.CHAT, max_tokens=probe.FEW_TOKENS))


def structured() -> None:
    assert client.parse("Hello", Mood, model=probe.CHAT, max_tokens=probe.CALL_TOKENS).mood in ("good", "bad")


def tools() -> None:
    seen: list[str] = []

    def note(mood: Literal["good", "bad"]) -> str:
        """Notes a mood."""
        seen.append(mood)
        return "noted"

    # The first response must call; the second is random text up to the limit.
    options = {"tool_choice": "required", "max_tokens": probe.CALL_TOKENS}
    assert client.run_tools("Hello", [note], model=probe.CHAT, **options).reply.text
    assert seen in (["good"], ["bad"])


def embeddings() -> None:
    found = [batch.vectors for batch in client.embed_many(probe.TEXTS, model=probe.EMBEDDINGS)]
    probe.check_vectors(found[0])


def rerank() -> None:
    rows = client.rerank("What is scarce?", probe.TEXTS, model=probe.RERANKER).results
    probe.check_ranks([row.index for row in rows], [row.score for row in rows])


def tokens() -> None:
    count = client.tokenize(probe.HELLO, model=probe.CHAT).count
    assert count == client.chat(probe.HELLO, model=probe.CHAT, max_tokens=1).usage.prompt_tokens


def models() -> None:
    assert {probe.CHAT, probe.EMBEDDINGS, probe.RERANKER} <= {model.id for model in client.models()}


def errors() -> None:
    code = probe.refused(lambda: client.chat("Hello", model="nobody"), sdk.NotFound, lambda error: error.code)
    assert code == "model_not_found"


def image() -> str:
    messages = [{"role": "user", "content": probe.IMAGE_PARTS}]
    return probe.refused(
        lambda: client.chat(messages, model=probe.CHAT), sdk.BadRequest, lambda error: error.param
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
