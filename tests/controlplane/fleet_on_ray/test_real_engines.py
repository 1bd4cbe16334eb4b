"""A fleet on Ray Serve with real engines, as configs/dev.yaml has them, and an LLM engine that is killed.

A box with vLLM and MiniLM, and one with MiniLM alone.
"""

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmark_control_plane.experiments.fleet.ray_cluster import listed_boxes
from benchmark_control_plane.experiments.fleet.simulated_boxes import serving_fleet
from tests.controlplane.fleet_on_ray.ray_marks import RUNS_A_FLEET
from tests.controlplane.fleet_on_ray.test_faults import (
    ADMIN,
    BOX,
    SECTIONS,
    replicas,
    require_empty_ledger,
    until,
)
from tests.test_engine_restart import CHATS, chat, embed_until, engine_of, until_one_streams

pytestmark = [*RUNS_A_FLEET, pytest.mark.slow]

log = logging.getLogger(__name__)
RECOVERY_SECONDS = 600.0
MESSAGE = {"model": "tiny-llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    content: dict[str, Any] = yaml.safe_load(Path("configs/dev.yaml").read_text(encoding="utf-8"))
    models = {key: content["models"][key] for key in ("chat", "embeddings")}
    box = {**content, **SECTIONS, "models": models}
    search = {**content, **SECTIONS, "models": {"embeddings": models["embeddings"]}}
    with serving_fleet(tmp_path, 1, sections=box, more_kinds={"search": search}, more_boxes=1) as fleet:
        yield fleet.url


async def test_a_killed_engine_leaves_no_request_without_an_answer(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:

        async def both_report() -> bool:
            return len([box for box in await listed_boxes(http, url, ADMIN) or [] if box["report"]]) == 2

        async def completes() -> bool:
            return await chat(http) == "done"

        await until(both_report, RECOVERY_SECONDS)
        answer = await http.post("/v1/chat/completions", json=MESSAGE)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0, answer.text
        assert await completes()
        body = {"model": "minilm", "input": "a text about queues"}
        vectors = (await http.post("/v1/embeddings", json=body)).json()["data"]
        assert [len(vector["embedding"]) for vector in vectors] == [384]

        over, streams = asyncio.Event(), asyncio.Event()
        embedding = asyncio.create_task(embed_until(http, over))
        chats = [asyncio.create_task(chat(http, streams)) for _ in range(CHATS)]
        await until_one_streams(chats, streams)
        [engine] = filter(None, map(engine_of, replicas(BOX)))
        os.kill(engine, signal.SIGKILL)
        killed = time.monotonic()
        ends = Counter(await asyncio.gather(*chats))
        ended, refused = time.monotonic(), await chat(http)
        waited = time.monotonic() - ended
        recovery = await until(completes, RECOVERY_SECONDS)
        over.set()
        embedded = await embedding
        log.info(
            "killed engine: %s, the last after %.1f s; then %s after %.1f s; served %.1f s later; "
            "embeddings meanwhile %s", dict(ends), ended - killed, refused, waited, recovery, dict(embedded),
        )  # fmt: skip
        assert ends["error event"] > 0 and set(ends) <= {"error event", "503", "429", "done"}
        assert refused == "503"
        assert set(embedded) == {200}
        boxes = await listed_boxes(http, url, ADMIN)
        assert boxes is not None and len(boxes) == 2
        for box in boxes:
            await require_empty_ledger(http, box["url"])
