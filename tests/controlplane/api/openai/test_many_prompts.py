"""Many short prompts in one body: together they are charged, and done in parts, like a long text."""

import asyncio

from controlplane.service.gate.prompt_preparation import PromptTokenizer
from tests.controlplane.api.scripted_server import CHAT_MODEL, Stage


async def test_many_short_prompts_are_charged_first_and_others_run_in_between(stage: Stage, monkeypatch):
    events: list[str] = []
    tokenize, init, turns = stage.generator.tokenize, PromptTokenizer.tokenize, 0

    async def tokenized(text: str) -> object:
        events.append(f"tokenize {turns}")
        return await tokenize(text)

    def charging(self, characters, work, job_to_charge):
        return init(self, characters, work, lambda: events.append("charge") or job_to_charge())

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(stage.generator, "tokenize", tokenized)
    monkeypatch.setattr(PromptTokenizer, "tokenize", charging)
    running = asyncio.create_task(others())
    body = {"model": CHAT_MODEL, "prompt": [f"{at:0200d}" for at in range(21)], "max_tokens": 1}
    answer = await stage.http.post("/v1/completions", json=body)
    running.cancel()
    assert (answer.status_code, len(answer.json()["choices"])) == (200, 21)
    assert events[::2] == ["charge"] * 21
    # Each was tokenized in a turn of the event loop of its own.
    assert len(set(events[1::2])) == 21
