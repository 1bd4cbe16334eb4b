"""LiteLLM's proxy, unmodified, with the list of models of docs/clients.md, on scripted engines."""

import asyncio
import json
import sys
from pathlib import Path

import httpx
import pytest

from benchmark_control_plane.common.servers import Server, free_port, serving
from tests.clients.recipes import on_scripted_engines, recipes
from tests.controlplane.api.scripted_server import TEXT, events, listening, staged

pytestmark = pytest.mark.long

# The proxy does not start with a weak one.
KEY = "sk-" + 32 * "a1"


async def test_the_proxy_passes_on_chat_embeddings_and_rerank(tmp_path: Path):
    pytest.importorskip("litellm_proxy_extras")
    async with staged() as stage, listening(stage.app) as url:
        await asyncio.to_thread(use, url, tmp_path)
        engines = (stage.generator, stage.embedder, stage.reranker)
        assert [len(engine.runs) for engine in engines] == [2, 1, 1]


def use(url: str, folder: Path) -> None:
    """Starts the proxy and asks each of its models."""
    config, port = folder / "config.yaml", free_port()
    config.write_text(on_scripted_engines(recipes("yaml")["LiteLLM"], url), encoding="utf-8")
    program = Path(sys.executable).with_name("litellm")
    command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    variables = {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    proxy = Server("LiteLLM's proxy", command, port, "/health/liveliness", variables=variables)
    headers, texts = {"authorization": f"Bearer {KEY}"}, ["A queue forms.", "Memory runs out."]
    with (
        serving(proxy, folder / "log"),
        httpx.Client(base_url=f"{proxy.url}/v1", headers=headers, timeout=60) as http,
    ):
        chat = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
        answer = http.post("/chat/completions", json=chat).json()
        assert answer["choices"][0]["message"]["content"] == TEXT
        *chunks, end = events(http.post("/chat/completions", json=chat | {"stream": True}))
        deltas = [choice["delta"] for chunk in chunks for choice in json.loads(chunk)["choices"]]
        # LiteLLM ends lines at U+2028, too, which TEXT contains.
        assert "".join(delta.get("content") or "" for delta in deltas) == TEXT and end == "[DONE]"
        embedded = http.post("/embeddings", json={"model": "embeddings", "input": texts}).json()
        assert [len(row["embedding"]) for row in embedded["data"]] == [8, 8]
        ranked = http.post(
            "/rerank", json={"model": "reranker", "query": "What runs out?", "documents": texts}
        )
        assert sorted(row["index"] for row in ranked.json()["results"]) == [0, 1]
