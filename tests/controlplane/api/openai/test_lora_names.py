"""LoRA adapters are models of their own for clients, and one model for the gate."""

import pytest

from controlplane.config import ConfigError, parse
from controlplane.core.prefix_index import PrefixIndex
from tests.controlplane.api.example_bodies import HI
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, RERANK_MODEL, staged

MODELS = {
    "chat": {
        "model": CHAT_MODEL,
        "engine": {"enable_lora": True},
        "lora_modules": {"poet": "adapters/poet", "clerk": "adapters/clerk"},
    },
    "embeddings": [{"model": EMBED_MODEL}],
    "rerankers": [{"model": RERANK_MODEL}],
}
BODIES = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v2/chat": {"messages": HI},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
}


async def test_adapters_are_listed_as_in_vllm():
    async with staged(models=MODELS) as stage:
        cards = {card["id"]: card for card in (await stage.http.get("/v1/models")).json()["data"]}
        one = (await stage.http.get("/v1/models/poet")).json()
    assert list(cards) == [CHAT_MODEL, EMBED_MODEL, RERANK_MODEL, "poet", "clerk"]
    assert (cards["poet"]["root"], cards["poet"]["parent"]) == ("adapters/poet", CHAT_MODEL)
    assert (cards[CHAT_MODEL]["root"], cards[CHAT_MODEL]["parent"]) == (CHAT_MODEL, None)
    assert one["id"] == "poet"


@pytest.mark.parametrize("path", BODIES)
async def test_the_adapter_reaches_the_engine(path: str):
    async with staged(models=MODELS) as stage:
        for model in ("poet", CHAT_MODEL):
            answer = await stage.http.post(path, json={"model": model, **BODIES[path]})
            assert answer.status_code == 200, answer.text
            assert answer.json().get("model", model) == model
        requests = [run.request for run in stage.generator.runs]
    assert [(one.model, one.adapter) for one in requests] == [(CHAT_MODEL, "poet"), (CHAT_MODEL, None)]


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_names_are_refused(path: str):
    async with staged(models=MODELS) as stage:
        answer = await stage.http.post(path, json={"model": "poets", **BODIES[path]})
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "model_not_found"
        assert f"{CHAT_MODEL}, clerk, poet" in error["message"]
        embedding = await stage.http.post("/v1/embeddings", json={"model": "poet", "input": "hi"})
        assert (embedding.status_code, embedding.json()["error"]["param"]) == (400, "model")
        assert stage.generator.runs == []


async def test_tokenization_takes_adapters_and_needs_no_model():
    async with staged(models=MODELS) as stage:
        counts = [
            (await stage.http.post("/tokenize", json={"prompt": "hi", **model})).json()["count"]
            for model in ({}, {"model": "poet"}, {"model": CHAT_MODEL})
        ]
    assert counts == [2, 2, 2]


def test_adapters_share_no_cached_prefix():
    index, prompt = PrefixIndex(4, 16), list(range(9))
    index.admit("first", index.hashes(prompt, "poet"))
    assert index.find(index.hashes(prompt, "poet")).cached == 2
    assert index.find(index.hashes(prompt, "clerk")).cached == 0
    assert index.find(index.hashes(prompt)).cached == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": {}}, "engine.enable_lora is not true"),
        ({"lora_modules": {EMBED_MODEL: "adapters/poet"}}, f"'{EMBED_MODEL}' names two models"),
        ({"lora_modules": {"poet": ""}}, "lora_modules"),
    ],
)
def test_wrong_adapters_stop_the_start(changes: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        parse({"models": MODELS | {"chat": MODELS["chat"] | changes}})
