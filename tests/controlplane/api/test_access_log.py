"""One line for each HTTP request at its end, with what the gate decided and measured."""

import asyncio
import logging
from hashlib import sha256
from typing import Any

import pytest

from controlplane.api import access_log
from controlplane.api.access_log import _BY_SEVERITY, ShedLines
from controlplane.api.settings import ApiSettings
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind
from controlplane.log_output import LogFields
from tests.controlplane.api.example_bodies import api_key
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, staged, until

PROMPT = {"model": CHAT_MODEL, "prompt": "hello"}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.msg, LogFields)
        self.found.append(dict(record.msg.fields))


@pytest.fixture
def lines() -> Any:
    log, handler = logging.getLogger("tandem.access"), Lines()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.found
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


async def test_a_served_request(lines):
    async with staged() as stage:
        headers = {"x-request-id": "mine"}
        answer = await stage.http.post("/v1/completions", json=PROMPT, headers=headers)
    (line,) = lines
    times = {name: line.pop(name) for name in list(line) if name.endswith("_ms")}
    assert line == {
        "request_id": "mine", "client": "127.0.0.1", "method": "POST", "path": "/v1/completions",
        "status": 200, "bytes": len(answer.content), "tenant": "default", "model": CHAT_MODEL,
        "kind": "generate", "class": "standard", "requests": 1, "outcome": "met", "decision": "ADMIT",
        "reason": None, "config_version": 1, "prompt_tokens": 5, "cached_tokens": 0, "output_tokens": 3,
        "preemptions": 0,
    }  # fmt: skip
    assert times.keys() == {
        "duration_ms", "queue_ms", "predicted_ttft_ms", "ttft_ms", "tpot_ms", "e2e_ms",
    }  # fmt: skip
    assert 0 <= times["queue_ms"] <= times["ttft_ms"] <= times["e2e_ms"] <= times["duration_ms"]


async def test_shed_requests_share_a_line(lines, monkeypatch):
    monkeypatch.setattr(access_log, "_SHED_SECONDS", 0.0)
    shed = ShedLines()
    for kind in (Kind.GENERATE, Kind.EMBED, Kind.GENERATE):
        shed.add(kind)
    await until(lambda: bool(lines))
    shed.add(Kind.EMBED)
    await until(lambda: len(lines) == 2)
    assert lines == [
        {"reason": "overloaded", "generate": 2, "embed": 1},
        {"reason": "overloaded", "generate": 0, "embed": 1},
    ]


async def test_several_prompts_are_one_line(lines):
    async with staged() as stage:
        await stage.http.post("/v1/completions", json={**PROMPT, "prompt": ["a", "bc"], "stream": True})
        await stage.http.post("/v1/embeddings", json={"model": EMBED_MODEL, "input": ["a", "b"]})
    completion, embedding = lines
    assert (completion["requests"], completion["prompt_tokens"], completion["output_tokens"]) == (2, 3, 6)
    assert (embedding["requests"], embedding["kind"], embedding["output_tokens"]) == (1, "embed", 0)


async def test_what_was_refused_says_why(lines):
    classes = {"picky": {"ttft_ms": 1, "default": True}}
    async with staged(
        ApiSettings(api_keys=(api_key("key", "web"),)), classes=classes, admission={"max_waiting": 0}
    ) as stage:
        await stage.http.post("/v1/completions", json=PROMPT)
        headers = {"authorization": "Bearer key"}
        await stage.http.post("/v1/completions", content=b"{", headers=headers)
        await stage.http.get("/nowhere?secret=1", headers=headers)
        stage.service.gate.is_closed = True
        await stage.http.post("/v1/completions", json=PROMPT, headers=headers)
        stage.service.gate.is_closed = False
    assert [(line["status"], line["path"]) for line in lines] == [
        (401, "/v1/completions"), (400, "/v1/completions"), (404, "/nowhere"), (503, "/v1/completions"),
    ]  # fmt: skip
    assert all("outcome" not in line for line in lines[:3])
    last = lines[3]
    assert (last["tenant"], last["outcome"], last["decision"], last["reason"]) == (
        "web", "rejected", "REJECT", "shutting_down",
    )  # fmt: skip


async def test_a_client_that_leaves_is_logged(lines):
    async with staged(is_stepped=True) as stage:
        asking = asyncio.create_task(stage.http.post("/v1/completions", json=PROMPT))
        await stage.generator.until_runs(1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    (line,) = lines
    assert (line["status"], line["outcome"], line["output_tokens"]) == (None, "aborted", 0)


async def test_what_is_asked_all_the_time_is_logged_only_if_it_fails(lines):
    async with staged(server={"admin_key_sha256": sha256(b"root").hexdigest()}) as stage:
        for path in ("/health", "/ready", "/metrics", "/admin/live", "/admin/load", "/version"):
            answer = await stage.http.get(path, headers={"authorization": "Bearer root"})
            assert answer.status_code == 200
        await stage.http.get("/admin/live")
        stage.generator.die()
        await stage.http.get("/ready")
        await stage.generator.start()
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/version", 200), ("/admin/live", 401), ("/ready", 503),
    ]  # fmt: skip


async def test_it_is_switched_off_while_the_server_runs(lines):
    digest = sha256(b"root").hexdigest()
    async with staged(server={"admin_key_sha256": digest}) as stage:
        headers = {"authorization": "Bearer root"}
        change = {"log": {"access": False, "level": "warning"}}
        answer = await stage.http.put("/admin/config", json=change, headers=headers)
        assert sorted(answer.json()["applied"]) == ["log.access", "log.level"]
        await stage.http.post("/v1/completions", json=PROMPT)
    assert [line["path"] for line in lines] == ["/admin/config"]


def test_every_outcome_has_a_severity():
    assert set(_BY_SEVERITY) == {None, *Outcome}
