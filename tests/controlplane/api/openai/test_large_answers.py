"""Large answers do not keep the event loop from other requests."""

import asyncio
from collections.abc import Iterable

import orjson
import pytest

from controlplane.api.openai import responses
from controlplane.api.openai.chat import ChatChoice
from controlplane.api.openai.logprobs import response_entries
from controlplane.core.generation import TokenLogprob
from tests.controlplane.api.example_bodies import CHAT, chat
from tests.controlplane.api.scripted_server import CHAT_MODEL, WORDS, Stage


async def test_other_tasks_run_between_the_choices_of_an_answer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    turns, seen, encode = 0, [], ChatChoice.to_json

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    def to_json(choice: ChatChoice, index: int) -> dict[str, object]:
        seen.append(turns)
        return encode(choice, index)

    monkeypatch.setattr(ChatChoice, "to_json", to_json)
    counting = asyncio.create_task(count())
    answer = await stage.http.post(CHAT, json=chat(n=3, temperature=1))
    counting.cancel()
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]
    assert seen[0] < seen[1] < seen[2]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_log_probabilities_of_a_response_are_encoded_once_and_as_they_come(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, *, is_streamed: bool
):
    encoded: list[list[str]] = []

    def entries(tokens: Iterable[TokenLogprob]) -> list[orjson.Fragment]:
        given = list(tokens)
        encoded.append([token.token for token in given])
        return response_entries(given)

    monkeypatch.setattr(responses, "response_entries", entries)
    include = ["message.output_text.logprobs"]
    body = {"model": CHAT_MODEL, "input": "hi", "include": include, "stream": is_streamed}
    assert (await stage.http.post("/v1/responses", json=body)).status_code == 200
    assert [tokens for tokens in encoded if tokens] == [[word] for word in WORDS]
