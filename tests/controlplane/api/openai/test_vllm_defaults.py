"""Fields of vLLM that are not served: its defaults are accepted, other values are refused by name."""

from typing import Any

import pytest

from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"model": CHAT_MODEL, "prompt": "hi"},
    EMBED: {"model": EMBED_MODEL, "input": "hi"},
}
OF_BOTH: dict[str, Any] = {
    "allowed_token_ids": None, "bad_words": [], "kv_transfer_params": None, "length_penalty": 1.0,
    "logprob_token_ids": None, "priority": 0, "prompt_logprobs": None, "return_token_ids": False,
    "return_tokens_as_token_ids": False, "session_id": None, "spaces_between_special_tokens": True,
    "thinking_token_budget": None, "truncate_prompt_tokens": None, "truncation_side": None,
    "use_beam_search": False,
}  # fmt: skip
DEFAULTS = {
    CHAT: OF_BOTH | {"documents": None, "echo": False},
    TEXT: OF_BOTH | {"add_special_tokens": True},
    EMBED: {"add_special_tokens": True, "priority": 0, "truncate_prompt_tokens": None},
}


@pytest.mark.parametrize("path", BODIES)
async def test_defaults_of_vllm_are_accepted(stage: Stage, path: str):
    for stated in (DEFAULTS[path], {"length_penalty": 1} if path != EMBED else {}):
        answer = await stage.http.post(path, json=BODIES[path] | stated)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "field", "value", "remedy"),
    [
        (CHAT, "length_penalty", 0.5, "beam search"),
        (CHAT, "length_penalty", True, "beam search"),
        (TEXT, "use_beam_search", True, "leave it out"),
        (CHAT, "bad_words", ["x"], "use logit_bias"),
        (CHAT, "prompt_logprobs", 1, "/v1/completions"),
        (CHAT, "return_token_ids", True, "use /tokenize"),
        (CHAT, "truncate_prompt_tokens", 5, "not cut"),
        (CHAT, "echo", True, "continue_final_message"),
        (TEXT, "add_special_tokens", False, "send token ids"),
        (EMBED, "add_special_tokens", False, "send token ids"),
    ],
)
async def test_other_values_are_refused_by_name(stage: Stage, path: str, field: str, value: Any, remedy: str):
    answer = await stage.http.post(path, json=BODIES[path] | {field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "unsupported_parameter")
    assert remedy in error["message"]
