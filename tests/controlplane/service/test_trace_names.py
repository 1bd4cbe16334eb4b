"""Names of spans and attributes are those of docs/tracing.md, of the GenAI conventions and of vLLM."""

import asyncio
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from backends.testing.scripted import Script
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    MAX_RUNNING,
    RERANK_MODEL,
    at_a_slow_pace,
    staged,
)
from tests.test_docs import ROOT

pytest.importorskip("opentelemetry.proto")

from tests.controlplane.service.otlp_receiver import Receiver, roots, values

PAGE = (ROOT / "docs/tracing.md").read_text(encoding="utf-8")
CLASSES = {
    "urgent": {"priority": 5, "ttft_ms": 5_000},
    "batch": {"priority": 0, "default": True, "sheddable": False},
    "fast": {"ttft_ms": 0.001, "sheddable": False},
}


def documented(section: str) -> set[str]:
    """The code spans of the first column of the table in a section of the page."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def names(attributes: Iterable[Any]) -> set[str]:
    return {name for each in attributes for name in values(each.attributes)}


async def served_freely(tracing: dict[str, Any]) -> None:
    """Two answers to a prompt that is cached in part, a miss, a rejection, embeddings and a reranking."""
    async with staged(tracing=tracing, classes=CLASSES) as stage:
        chat = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "hello"}], "n": 2}
        prompt = {"model": CHAT_MODEL, "prompt": "hello"}
        rerank = {"model": RERANK_MODEL, "query": "q", "documents": ["a"]}
        stage.generator.upcoming += [Script(tokens=3, cached_tokens=2)] * 2
        for path, body in (
            ("chat/completions", chat),
            ("completions", prompt),
            ("completions", {**prompt, "service_class": "fast"}),
            ("embeddings", {"model": EMBED_MODEL, "input": ["a", "b"]}),
            ("rerank", rerank),
        ):
            assert (await stage.http.post(f"/v1/{path}", json=body)).status_code == 200
        await stage.service.drain()
        assert (await stage.http.post("/v1/completions", json=prompt)).status_code == 503


async def with_a_preemption(tracing: dict[str, Any]) -> None:
    async with staged(
        is_stepped=True, tracing=tracing, classes=CLASSES, admission={"engine_queue": 0}
    ) as stage:
        stage.generator.default = Script(tokens=60)
        body = {"model": CHAT_MODEL, "prompt": "hello", "max_tokens": 60}

        def ask(name: str) -> asyncio.Task[Any]:
            call = stage.http.post("/v1/completions", json={**body, "service_class": name})
            return asyncio.create_task(call)

        asking = [ask("batch") for _ in range(MAX_RUNNING)]
        await stage.generator.until_runs(MAX_RUNNING)
        await at_a_slow_pace(stage)
        asking += [ask("urgent")]
        await stage.generator.until_runs(MAX_RUNNING + 1)
        while not all(task.done() for task in asking):
            stage.generator.allow()
            await asyncio.sleep(0)


async def test_the_page_names_every_span_and_attribute_and_no_other(receiver: Receiver):
    tracing = {"endpoint": receiver.url, "sample": 1.0}
    await served_freely(tracing)
    await with_a_preemption(tracing)
    models = "|".join((CHAT_MODEL, EMBED_MODEL, RERANK_MODEL))
    assert {re.sub(models, "MODEL", span.name) for span in receiver.spans} == documented("Spans")
    events = [event for span in receiver.spans for event in span.events]
    assert {event.name for event in events} == {"decision", "preemption"}
    assert names([*receiver.spans, *events]) == documented("Attributes")


async def test_names_are_those_of_the_conventions_and_of_vllm(receiver: Receiver):
    conventions = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    genai = {value for name, value in vars(conventions).items() if name.startswith("GEN_AI_")}
    vllm = names_of_vllm()
    await served_freely({"endpoint": receiver.url, "sample": 1.0})
    assert {name for name in names(receiver.spans) if name.startswith("gen_ai.")} <= genai | vllm
    # A number that has a name in each has both.
    stated = re.findall(r"`(gen_ai[\w.]+)` \((?:vLLM: )?`(gen_ai[\w.]+)`\)", PAGE)
    assert len(stated) == 3
    for of_genai, of_vllm in stated:
        assert of_genai in genai and of_vllm in vllm
        found = [values(root.attributes) for root in roots(receiver)]
        assert all(each.get(of_genai) == each.get(of_vllm) for each in found)
        assert any(of_genai in each for each in found)


def names_of_vllm() -> set[str]:
    """The attributes of vLLM's own spans, read from its source: importing vLLM takes seconds."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        pytest.skip("vllm is not installed")
    text = Path(package.origin).with_name("tracing").joinpath("utils.py").read_text(encoding="utf-8")
    return set(re.findall(r'= "(gen_ai\.[\w.]+)"', text))
