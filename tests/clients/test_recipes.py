"""The recipes of docs/clients.md on scripted engines; those whose packages are not installed are skipped."""

import asyncio

import pytest

from tests.clients.client_table import (
    CLIENTS,
    FEATURES,
    NO_CALL,
    PAGE,
    Client,
    Row,
    table_of,
    with_table,
)
from tests.clients.recipes import on_scripted_engines, recipes
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    RERANK_MODEL,
    TEXT,
    Stage,
    events,
    listening,
    staged,
)

MODULES = {
    "LangChain": ("langchain_openai",),
    "LlamaIndex": ("llama_index.llms.openai_like", "llama_index.embeddings.openai_like"),
    "Haystack": ("haystack", "haystack_integrations.components.rankers.cohere"),
    "LiteLLM": ("litellm",),
}
CLASSES = {"interactive": {"default": True, "ttft_ms": 1_000}}


def test_every_recipe_is_run():
    assert set(recipes()) == set(MODULES)
    assert {client.name for client in CLIENTS} >= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
async def test_recipe(name: str):
    for module in MODULES[name]:
        pytest.importorskip(module)
    async with staged(classes=CLASSES) as stage, listening(stage.app) as url:
        # LlamaIndex's query has more bytes than the context of other tests has tokens.
        stage.generator.max_model_tokens = 2_048
        found: dict[str, object] = {}
        await asyncio.to_thread(exec, on_scripted_engines(recipes()[name], url), found)
        assert found["answer"] == TEXT


async def test_requests_of_open_webui():
    async with staged() as stage:
        await check_open_webui(stage)


async def check_open_webui(stage: Stage) -> None:
    models = (await stage.http.get("/v1/models", headers={"authorization": "Bearer unused"})).json()["data"]
    assert {CHAT_MODEL, EMBED_MODEL} <= {model["id"] for model in models}
    body = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    streamed = await stage.http.post(
        "/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}
    )
    assert events(streamed)[-1] == "[DONE]"
    texts = ["first", "second"]
    embedded = await stage.http.post("/v1/embeddings", json={"input": texts, "model": EMBED_MODEL})
    assert [len(row["embedding"]) for row in embedded.json()["data"]] == [8, 8]
    body = {"model": RERANK_MODEL, "query": "what", "documents": texts, "top_n": len(texts)}
    ranked = (await stage.http.post("/v1/rerank", json=body)).json()["results"]
    by_index = sorted(ranked, key=lambda row: row["index"])
    assert [isinstance(row["relevance_score"], float) for row in by_index] == [True, True]


def test_page_has_a_row_for_each_client_and_a_column_for_each_feature():
    table = PAGE.read_text(encoding="utf-8").partition("table: begin")[2].partition("table: end")[0]
    header, _, *rows = [line for line in table.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["client", "version", *FEATURES, "CI"]
    assert [row.split("|")[1].strip() for row in rows] == [client.name for client in CLIENTS]
    assert "FAILS" not in table


def test_table_lists_what_ran_and_what_did_not():
    client = Client("a client", "probes.py")
    rows = [Row(client, "1.2", {"chat": "works", "images": "messages.0.content"})]
    text = with_table("a\n<!-- table: begin -->\nold\n<!-- table: end -->\nb", table_of(rows))
    cells = {"chat": "works", "images": "`messages.0.content`"}
    line = " | ".join(cells.get(feature, NO_CALL) for feature in FEATURES)
    assert f"| a client | 1.2 | {line} | {NO_CALL} |" in text and "old" not in text
    assert text.startswith("a\n") and text.endswith("\nb")
    assert f"Not run, because not installed: {CLIENTS[0].name}" in text
    with pytest.raises(ValueError, match="lacks the lines"):
        with_table("a", "table")
