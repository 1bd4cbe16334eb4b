"""Programs and curl requests of README.md and the pages for users run as they are printed."""

import asyncio
import hashlib
import json
import re
import shlex
from pathlib import Path

import httpx
import pytest

from controlplane.api.settings import ApiSettings
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, RERANK_MODEL, listening, staged

ROOT = Path(__file__).parents[3]
PAGES = ("README.md", "docs/api.md", "docs/first-day-on-a-gpu.md", "docs/operator-guide.md")
TEXT = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
KEY = "the operator's"
SETTINGS = ApiSettings(admin_key_sha256=hashlib.sha256(KEY.encode()).hexdigest())
# Without their programs.
MORE = "".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("embeddings", "fleet"))
CURLS = re.findall(r"^(curl (?:.*\\\n)*.*)$", TEXT + MORE, re.MULTILINE)
CLASSES = {"interactive": {"default": True, "ttft_ms": 1_000}, "batch": {"sheddable": False}}
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def here(example: str, url: str) -> str:
    names = {"http://127.0.0.1:8000": url, "http://ADDRESS": url, "$ADMIN_KEY": KEY}
    names |= {"tiny-llama": CHAT_MODEL, "minilm": EMBED_MODEL, "tiny-reranker": RERANK_MODEL}
    names |= {"qwen2.5-7b-instruct": CHAT_MODEL, "bge-m3": EMBED_MODEL}
    for shown, ours in names.items():
        example = example.replace(shown, ours)
    return example


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
async def test_programs_run(program, monkeypatch):
    monkeypatch.chdir(ROOT)
    async with staged(classes=CLASSES) as stage, listening(stage.app) as url:
        # One token per byte: room for two paragraphs of the documentation.
        stage.generator.max_model_tokens = 4_096
        found: dict[str, object] = {}
        await asyncio.to_thread(exec, here(program, url), found)
        assert {"answer", "vectors"} & set(found)


@pytest.mark.parametrize("curl", CURLS)
async def test_curl_requests_succeed(curl):
    async with staged(SETTINGS, classes=CLASSES) as stage:
        # As in configs/dev.yaml.
        stage.generator.max_model_tokens = 2_048
        words = shlex.split(here(curl, "http://tandem.test").partition("|")[0])
        headers = [words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H"]
        (url,) = [word for word in words if word.startswith("http")]
        body = json.loads(words[words.index("-d") + 1]) if "-d" in words else None
        method = words[words.index("-X") + 1] if "-X" in words else "GET" if body is None else "POST"
        request = httpx.Request(method, url, headers=headers, json=body)
        answer = await stage.http.send(request)
    assert answer.status_code == 200, answer.text


def test_examples_were_found():
    assert (len(CURLS), len(PROGRAMS)) == (11, 6)
