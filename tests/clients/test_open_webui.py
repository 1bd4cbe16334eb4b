"""Open WebUI, unmodified, with the variables of docs/clients.md, on scripted engines."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.testing.scripted import Script
from benchmark_control_plane.common.servers import Server, free_port, serving
from tests.clients.recipes import on_scripted_engines, recipes
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    RERANK_MODEL,
    TEXT,
    events,
    listening,
    staged,
)

_PYTHON = os.environ.get("TANDEM_OPEN_WEBUI")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_PYTHON is None, reason="TANDEM_OPEN_WEBUI names no Python with Open WebUI"),
]

PARAGRAPHS = [f"Paragraph {number}. " + 20 * "Memory runs out. " for number in range(6)]
# Its first request for a question asks the model for search terms.
TERMS = Script(tokens=1, words=('{"queries": ["memory"]}',))


async def test_a_page_is_embedded_and_a_question_about_it_is_answered(tmp_path: Path):
    async with staged() as stage, listening(stage.app) as url:
        stage.generator.max_model_tokens = 16_384
        # A token is a byte.
        stage.embedder.max_input_tokens = stage.reranker.max_input_tokens = 512
        stage.generator.upcoming.append(TERMS)
        await asyncio.to_thread(use, url, tmp_path)
        passages, terms = ([bytes(text) for text in run.inputs] for run in stage.embedder.runs)
        assert passages == [paragraph.strip().encode() for paragraph in PARAGRAPHS]
        assert terms == [b"memory"]
        [ranked] = stage.reranker.runs
        assert {bytes(pair) for pair in ranked.inputs} <= {b"memory" + passage for passage in passages}
        asked, answered = (bytes(run.prompt) for run in stage.generator.runs)
        assert b"queries" in asked and b"What runs out?" in answered
        # Of six passages it sends the three best.
        assert sum(passage in answered for passage in passages) == 3


def use(url: str, folder: Path) -> None:
    """Starts Open WebUI, uploads two pages and asks about the first."""
    port = free_port()
    program = Path(str(_PYTHON)).with_name("open-webui")
    command = [str(program), "serve", "--host", "127.0.0.1", "--port", str(port)]
    recipe = on_scripted_engines(recipes("env")["Open WebUI"], url)
    own = {
        "DATA_DIR": str(folder), "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "unused", "OFFLINE_MODE": "True",
        "ENABLE_OLLAMA_API": "False", "PYTHONPATH": "",
    }  # fmt: skip
    variables = dict(line.split("=", 1) for line in recipe.splitlines()) | own
    server = Server("Open WebUI", command, port, "/ready", variables=variables)
    with serving(server, folder / "log"), httpx.Client(base_url=f"{server.url}/api", timeout=60) as http:
        signed_in = http.post("/v1/auths/signin", json={"email": "", "password": ""}).json()
        http.headers["authorization"] = f"Bearer {signed_in['token']}"
        models = {model["id"] for model in http.get("/models").json()["data"]}
        assert models == {CHAT_MODEL, EMBED_MODEL, RERANK_MODEL}
        page = upload(http, "\n\n".join(PARAGRAPHS))
        assert page["data"]["status"] == "completed"
        # 400 characters are one passage, here of 800 tokens.
        refused = upload(http, 400 * "é")
        assert refused["data"]["status"] == "failed" and "400" in refused["data"]["error"]
        sources, answer = ask(http, "What runs out?", page["id"])
        assert len(sources) == 3 and set(sources) <= {paragraph.strip() for paragraph in PARAGRAPHS}
        assert answer == TEXT


def upload(http: httpx.Client, text: str) -> dict[str, Any]:
    """The file that Open WebUI has made of a page, once it has been embedded or refused."""
    sent = {"file": ("page.md", text, "text/markdown")}
    made = http.post("/v1/files/", params={"process_in_background": False}, files=sent).json()
    found: dict[str, Any] = http.get(f"/v1/files/{made['id']}").json()
    return found


def ask(http: httpx.Client, question: str, file: str) -> tuple[list[str], str]:
    """The passages that an answer names as its sources, and the answer."""
    body = {
        "model": CHAT_MODEL,
        "messages": [{"role": "user", "content": question}],
        "files": [{"type": "file", "id": file}],
        "stream": True,
    }
    first, *parts, end = events(http.post("/chat/completions", json=body))
    assert end == "[DONE]"
    deltas = [choice["delta"] for part in parts for choice in json.loads(part)["choices"]]
    return json.loads(first)["sources"][0]["document"], "".join(delta.get("content", "") for delta in deltas)
