"""Several prompts in one body."""

from controlplane.service.gate.prompt_preparation import PromptTokenizer
from tests.controlplane.api.scripted_server import CHAT_MODEL, Stage


async def test_many_short_prompts_are_charged_before_they_are_tokenized(stage: Stage, monkeypatch):
    seen = []
    tokenize = PromptTokenizer.tokenize

    def counted(self, characters, work, job_to_charge):
        seen.append(characters)
        return tokenize(self, characters, work, job_to_charge)

    monkeypatch.setattr(PromptTokenizer, "tokenize", counted)
    body = {"model": CHAT_MODEL, "prompt": ["x" * 90, "y" * 60], "max_tokens": 1}
    assert (await stage.http.post("/v1/completions", json=body)).status_code == 200
    assert seen == [150, 150]
