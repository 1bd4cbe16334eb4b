"""Embedding models and rerankers change over HTTP; what is shown of them follows."""

import asyncio
from hashlib import sha256
from typing import Any

import pytest

from backends.testing.scripted import ScriptedEmbedder
from controlplane.config import Config
from controlplane.config.models_section import WorkerModel
from controlplane.service.worker_replacement import WorkerBuilder
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    MODELS,
    RERANK_MODEL,
    SCRIPTED_WORKERS,
    Stage,
    staged,
    until,
)

ADMIN = {"authorization": "Bearer root"}
SERVER = {"admin_key_sha256": sha256(b"root").hexdigest()}
SECOND = {"model": "second", "dimensions": [16]}


async def put(stage: Stage, status: int = 200, *, query: str = "", **models: Any) -> Any:
    content = {"models": {**MODELS, **models}, "server": SERVER}
    answer = await stage.http.put(f"/admin/config{query}", json=content, headers=ADMIN)
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]["message"]


async def embedded(stage: Stage, model: str) -> tuple[int, Any]:
    answer = await stage.http.post("/v1/embeddings", json={"model": model, "input": "x"})
    body = answer.json()
    return answer.status_code, len(body["data"][0]["embedding"]) if "data" in body else body["error"]["code"]


async def served(stage: Stage) -> list[str]:
    answer = await stage.http.get("/v1/models")
    return [card["id"] for card in answer.json()["data"]]


async def test_models_are_added_replaced_and_removed():
    async with staged(server=SERVER, worker_builder=SCRIPTED_WORKERS) as stage:
        answer = await put(stage, embeddings=[*MODELS["embeddings"], SECOND], query="?dry_run=true")
        assert answer["workers"]["models"]["second"]["action"] == "start"
        assert await embedded(stage, "second") == (404, "model_not_found")
        answer = await put(stage, embeddings=[*MODELS["embeddings"], SECOND])
        assert answer["applied"]["models.embeddings.1.model"] == {"from": None, "to": "second"}
        assert answer["needs_restart"] == {}
        assert await embedded(stage, "second") == (200, 16)
        assert await embedded(stage, EMBED_MODEL) == (200, 8)
        assert await served(stage) == [CHAT_MODEL, EMBED_MODEL, "second", RERANK_MODEL]
        answer = await put(stage, embeddings=[{"model": EMBED_MODEL, "batch_tokens": 128}], rerankers=[])
        actions = {name: each["action"] for name, each in answer["workers"]["models"].items()}
        assert actions == {EMBED_MODEL: "replace", "second": "stop", RERANK_MODEL: "stop"}
        assert await embedded(stage, EMBED_MODEL) == (200, 16)
        assert await embedded(stage, "second") == (404, "model_not_found")
        assert await served(stage) == [CHAT_MODEL, EMBED_MODEL]
        assert (await stage.http.get("/ready")).status_code == 200
        await until(lambda: not stage.service.encoders.leaving)
        shown = await stage.http.get("/admin/config", headers=ADMIN)
        assert shown.json()["workers"] == {"loading": None, "leaving": [], "reserved_bytes": 0}
        feed = (await stage.http.get("/admin/live?since=0", headers=ADMIN)).json()
        assert feed["about"]["models"] == {"llm": [CHAT_MODEL], "embedding": [EMBED_MODEL]}
        events = [(one["model"], one["state"]) for one in feed["records"] if one["type"] == "restart"]
        assert sorted(events) == sorted(
            [("second", "started"), (EMBED_MODEL, "started")]
            + [(name, "stopped") for name in (EMBED_MODEL, "second", RERANK_MODEL)]
        )
        assert feed["records"][-1]["type"] != "fault"


async def test_a_request_in_flight_is_answered_by_the_worker_that_has_it():
    async with staged(server=SERVER, worker_builder=SCRIPTED_WORKERS, is_stepped=True) as stage:
        asking = asyncio.create_task(embedded(stage, EMBED_MODEL))
        await stage.embedder.until_runs(1)
        answer = await put(stage, embeddings=[SECOND])
        assert answer["workers"]["models"][EMBED_MODEL] == {"action": "stop"}
        shown = await stage.http.get("/admin/config", headers=ADMIN)
        assert shown.json()["workers"]["leaving"] == [{"model": EMBED_MODEL, "requests": 1}]
        assert await embedded(stage, EMBED_MODEL) == (404, "model_not_found")
        stage.embedder.allow()
        assert await asking == (200, 8)


@pytest.mark.parametrize("is_watched", [False, True])
async def test_a_model_that_does_not_load_is_shown_and_changes_nothing(is_watched: bool):  # noqa: FBT001
    async with staged(server=SERVER, worker_builder=SCRIPTED_WORKERS) as stage:
        query = "?guard_ms=60000" if is_watched else ""
        broken = [{"model": "broken", "name": EMBED_MODEL}]
        assert "out of memory" in await put(stage, 503, embeddings=broken, query=query)
        shown = (await stage.http.get("/admin/config", headers=ADMIN)).json()
        assert (shown["version"], shown["guard"]) == (1, None)
        assert "does not load: out of memory" in shown["last_failure"]["error"]
        assert await embedded(stage, EMBED_MODEL) == (200, 8)
        feed = (await stage.http.get("/admin/live?since=0", headers=ADMIN)).json()
        (event,) = [one for one in feed["records"] if one["type"] == "restart"]
        assert (event["model"], event["state"]) == (EMBED_MODEL, "failed")


async def test_a_roll_back_replaces_the_workers_again():
    async with staged(server=SERVER, worker_builder=SCRIPTED_WORKERS) as stage:
        await put(stage, embeddings=[SECOND])
        answer = await stage.http.post("/admin/config/rollback", headers=ADMIN)
        workers = answer.json()["workers"]["models"]
        assert {name: each["action"] for name, each in workers.items()} == {
            EMBED_MODEL: "start",
            "second": "stop",
        }
        assert await served(stage) == [CHAT_MODEL, EMBED_MODEL, RERANK_MODEL]


async def test_an_engine_that_restarts_gets_its_options_while_workers_load():
    may_load, is_loading = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        is_loading.set()
        await may_load.wait()

    def slow(config: Config, model: WorkerModel) -> ScriptedEmbedder:
        worker = SCRIPTED_WORKERS.build(config, model)
        worker.on_start = wait
        return worker

    builder = WorkerBuilder(slow, SCRIPTED_WORKERS.needs)
    async with staged(
        server=SERVER, worker_builder=builder, scheduling={"engine": {"ordering": "edf"}}
    ) as stage:
        changing = asyncio.create_task(put(stage, embeddings=[SECOND]))
        await is_loading.wait()
        stage.generator.options.clear()
        await stage.service.reconfiguration.engine_restarted()
        assert stage.generator.options["ordering"] == "edf"
        may_load.set()
        await changing


async def test_without_a_builder_models_need_a_restart():
    async with staged(server=SERVER) as stage:
        answer = await put(stage, embeddings=[SECOND])
        assert set(answer["needs_restart"]) == {"models.embeddings.0.dimensions", "models.embeddings.0.model"}
        assert "workers" not in answer
