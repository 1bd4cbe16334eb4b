"""200 changes of the configuration under load: nothing is lost, and no decision mixes two versions."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.api.body_parsing import BodyParser
from controlplane.api.settings import live_settings
from controlplane.config.live_keys import LIVE, WITH_MOVING_QUOTAS, entry_of
from controlplane.config.log_section import LogSection
from controlplane.core.clock import milliseconds
from controlplane.core.request import Owner
from controlplane.log_output import set_up_logging, update_logging
from controlplane.service.gate import dispatcher as dispatcher_module
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    RERANK_MODEL,
    SCRIPTED_WORKERS,
    Stage,
    staged,
)

KEYS = {"authorization": "Bearer root"}
DIGEST = sha256(b"root").hexdigest()
CHANGES, REQUESTS = 200, 300
LEVELS = ("info", "warning")
# Entries of `live_keys` that are sections; any other is a key of one.
WHOLE = {
    "classes", "tenants", "scheduling", "log", "models.embeddings", "models.rerankers",
    "quota.llm", "quota.embedding",
}  # fmt: skip


def section_of(entry: str) -> str:
    """The section of an entry of `live_keys`."""
    return entry if entry in WHOLE else entry.rpartition(".")[0]


def configured(number: int) -> dict[str, Any]:
    """Sections in which the number of the version occurs in every key that decisions depend on."""
    gold = {"default": True, "priority": number % 100, "sheddable": False}
    return {
        "classes": {"gold": {**gold, "ttft_ms": 60_000 + number, "e2e_ms": 120_000 + number}},
        "tenants": {"web": {"api_keys_sha256": [DIGEST], "requests_per_minute": 1e6 + number}},
        "admission": {"max_waiting": 1_000 + number, "engine_queue": number % 3},
        "scheduling": {
            "priority_head_start_ms": 1_000 + number,
            "engine": {"ordering": ("edf", "srmt")[number % 2], "urgency": number / 1_000},
        },
        "server": {"admin_key_sha256": DIGEST, "limits": {"max_answer_values": 100_000 + number}},
    }


def configured_everywhere(number: int, folder: Path) -> dict[str, Any]:
    """A whole configuration in which the number occurs in every section that a server takes live."""
    sections = configured(number)
    workers = {"batch_tokens": 1_000 + number // 20}
    return {
        **sections,
        "models": {
            "chat": {"model": CHAT_MODEL},
            "embeddings": [{"model": EMBED_MODEL}, {"model": "second", **workers}],
            "rerankers": [{"model": RERANK_MODEL, **workers}],
        },
        "server": {**sections["server"], "stalled_client_ms": 60_000 + number},
        "pool": {"kv_allocator": "kvcached"},
        "quota": {
            "max_step": 0.05 + number / 10_000,
            "llm": {"nominal": 0.2 + number / 1_000, "borrow": number / 1_000},
            "embedding": {"nominal": 0.8 - number / 1_000},
            "forecast": {"quantile": 0.5 + number / 1_000},
        },
        "log": {"level": LEVELS[number % 2]},
        "decision_log": {"dir": str(folder), "sample": number / 1_000},
        # Nothing listens there: what it traces is lost, and no request is.
        "tracing": {"endpoint": "http://127.0.0.1:9", "sample": number / 1_000},
    }


async def ask(stage: Stage, index: int) -> httpx.Response:
    if index % 3:
        body = {"model": CHAT_MODEL, "prompt": "x" * (index % 50 + 1), "max_tokens": 3}
        return await stage.http.post("/v1/completions", json=body, headers=KEYS)
    return await stage.http.post(
        "/v1/embeddings", json={"model": EMBED_MODEL, "input": ["x"] * 3}, headers=KEYS
    )


@pytest.fixture
def log_output() -> Iterator[None]:
    """The log output of a server, for the time of a test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    set_up_logging(LogSection())
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.long
@pytest.mark.usefixtures("log_output")
async def test_nothing_is_lost_and_no_decision_mixes_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    pytest.importorskip("opentelemetry", reason="the extra `otel` is not installed")
    cycles: list[tuple[int, int, int]] = []
    run_cycle = dispatcher_module.run_cycle

    def recorded(view: Any, now: Any, admission: Any) -> Any:
        policies = stage.service.gate.dispatcher._policies
        head_start = policies.ordering.options.priority_head_start
        cycles.append((policies.version, admission.options.max_waiting, head_start))
        return run_cycle(view, now, admission)

    monkeypatch.setattr(dispatcher_module, "run_cycle", recorded)
    first = configured_everywhere(1, tmp_path)
    del first["models"]
    async with staged(worker_builder=SCRIPTED_WORKERS, **first) as stage:
        stage.service.reconfiguration.listeners.append(lambda version: update_logging(version.config.log))
        stage.generator._token_seconds = 0.002
        asking, changed = [], Counter[str]()
        for number in range(2, CHANGES + 2):
            # Begun by the number of the change and not by time, so that requests meet many versions.
            asked = len(asking), (number - 1) * REQUESTS // CHANGES
            asking += [asyncio.create_task(ask(stage, index)) for index in range(*asked)]
            wanted = configured_everywhere(number, tmp_path)
            answer = await stage.http.put("/admin/config", json=wanted, headers=KEYS)
            assert (answer.status_code, answer.json()["version"]) == (200, number), answer.text
            assert answer.json()["needs_restart"] == {}
            changed.update({section_of(entry_of(key)) for key in answer.json()["applied"]})
            await asyncio.sleep(0.002)
        assert Counter([(await task).status_code for task in asking]) == {200: REQUESTS}
        ended = stage.service.gate.dispatcher.recorder.kept
        assert len(ended) == REQUESTS
        assert {most - 1_000 for _, most, _ in cycles} == {version for version, _, _ in cycles}
        for version, most, head_start in cycles:
            assert (most, head_start) == (1_000 + version, milliseconds(1_000 + version))
        arrived: set[int] = set()
        for ticket in ended:
            slo, service_class = ticket.request.slo, ticket.request.service_class
            number = round(slo.ttft / 1e6) - 60_000
            arrived.add(number)
            assert slo.e2e == milliseconds(120_000 + number)
            assert service_class.priority == number % 100
            assert all(event.version >= number for event in ticket.history)
        assert len(arrived) > 20
        assert stage.generator.options["urgency"] == (CHANGES + 1) / 1_000
        last = CHANGES + 1
        assert stage.service.reconfiguration.active.number == last
        assert logging.getLogger().level == getattr(logging, LEVELS[last % 2].upper())
        assert live_settings(stage.service)().trace_share == last / 1_000
        sharing = stage.service.quota_controller.pool.sharing
        assert sharing.borrow[Owner.LLM] == int(last / 1_000 * sharing.options.pool)
    # No section is left out, so a section that becomes live has to be added here.
    assert changed.keys() == {section_of(entry) for entry in (*LIVE, *WITH_MOVING_QUOTAS)}
    assert {changed[name] for name in changed.keys() - {"models.embeddings", "models.rerankers"}} == {CHANGES}


async def test_a_request_keeps_the_version_that_it_began_with(monkeypatch: pytest.MonkeyPatch):
    parse, may_parse, begun = BodyParser.parse, asyncio.Event(), asyncio.Event()

    async def slow(self: BodyParser, *arguments: Any, **options: Any) -> Any:
        begun.set()
        await may_parse.wait()
        return await parse(self, *arguments, **options)

    async with staged(**configured(1)) as stage:
        monkeypatch.setattr(BodyParser, "parse", slow)
        asking = asyncio.create_task(ask(stage, 1))
        await begun.wait()
        classes = {"gold": None, "silver": {"default": True}}
        change = {"classes": classes, "server": {"limits": {"max_answer_values": 1, "max_depth": 1}}}
        answer = await stage.http.put("/admin/config", json=change, headers=KEYS)
        assert answer.status_code == 200, answer.text
        may_parse.set()
        assert (await asking).status_code == 200
        (ticket,) = stage.service.gate.dispatcher.recorder.kept
        assert ticket.request.service_class.name == "gold"
        assert [event.version for event in ticket.history] == [2]
