"""The admin endpoints while requests run."""

import asyncio
from hashlib import sha256
from unittest.mock import ANY

import pytest

from controlplane.api.settings import ApiSettings
from controlplane.core.errors import Refused
from controlplane.core.request import Owner
from controlplane.service.memory.monitor import MemoryMonitor
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, RERANK_MODEL, staged, until
from tests.controlplane.service.test_service import DeviceWithFreeBytes

ADMIN = {"authorization": "Bearer root"}
SETTINGS = ApiSettings(admin_key_sha256=sha256(b"root").hexdigest())


async def test_suspended_quotas_are_reported():
    async with staged(SETTINGS, pool={"kv_allocator": "kvcached"}, quota={"tick_ms": 10_000}) as stage:
        assert (await stage.http.get("/ready")).json() == {"status": "ready"}
        stage.service.quota_controller.health.failed(Refused("no such quota"))
        ready = await stage.http.get("/ready")
        assert ready.status_code == 200
        assert ready.json() == {"status": "ready", "impaired": {"quotas": "refused"}}
        found = (await stage.http.get("/admin/state", headers=ADMIN)).json()["sharing"]["health"]
        assert found == {"fault": "refused", "message": "no such quota", "failures": {"refused": 1}}
        assert 'tandem_quota_failures_total{fault="refused"} 1.0' in (await stage.http.get("/metrics")).text


async def test_drain():
    async with staged(SETTINGS, is_stepped=True) as stage:
        body = {"model": CHAT_MODEL, "prompt": "x"}
        running = asyncio.create_task(stage.http.post("/v1/completions", json=body))
        await stage.generator.until_runs(1)
        draining = asyncio.create_task(stage.http.post("/admin/drain", headers=ADMIN))
        await until(lambda: stage.service.gate.is_closed)
        late = await stage.http.post("/v1/completions", json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        ready = await stage.http.get("/ready")
        assert ready.status_code == 503
        assert "was drained" in ready.json()["error"]["message"]
        assert not draining.done()
        stage.generator.allow(3)
        assert (await running).status_code == 200
        assert (await draining).json() == {"status": "drained"}
        assert (await stage.http.get("/health")).status_code == 200
        assert (await stage.http.post("/admin/drain", headers=ADMIN)).json() == {"status": "drained"}


async def test_admin_needs_the_admin_key():
    async with staged(SETTINGS) as stage:
        assert (await stage.http.post("/admin/drain")).status_code == 401
        assert (await stage.http.post("/admin/explain", json=ASKED)).status_code == 401
        assert (await stage.http.get("/admin/explain/any")).status_code == 401
        assert (await stage.http.get("/admin/config")).status_code == 401
        assert (await stage.http.put("/admin/config", json={})).status_code == 401
        answer = await stage.http.put("/admin/config", content=b"{", headers=ADMIN)
        assert answer.json()["error"]["code"] == "invalid_json"


async def test_readiness_names_memory_that_is_withheld():
    async with staged(SETTINGS) as stage:
        device = DeviceWithFreeBytes(free=1_000)
        monitor = MemoryMonitor(device, lambda: 0, lambda _: None, 1_000)
        stage.service.status.monitor = monitor
        monitor.sample()
        assert (await stage.http.get("/ready")).json() == {"status": "ready"}
        device.free = 999
        monitor.sample()
        ready = await stage.http.get("/ready")
        assert (ready.status_code, ready.json()) == (
            200,
            {"status": "ready", "impaired": {"memory": "withheld"}},
        )
        state = (await stage.http.get("/admin/state", headers=ADMIN)).json()
        assert state["device"]["withheld"] == 1
        device.free = 1_000
        monitor.sample()
        assert (await stage.http.get("/ready")).json() == {"status": "ready"}


ASKED = {"model": CHAT_MODEL, "prompt_tokens": 16, "max_tokens": 8}


async def explained(stage, **said):
    answer = await stage.http.post("/admin/explain", json={**ASKED, **said}, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_explain_is_a_dry_run():
    async with staged(SETTINGS, is_stepped=True, admission={"engine_queue": 0}) as stage:
        before = stage.service.status.state()
        found = await explained(stage)
        assert (found["decision"], found["reason"], found["victims"]) == ("ADMIT", None, [])
        assert found["request"]["class"] == "standard"
        assert 0 < found["memory"]["needs_bytes"] <= found["memory"]["may_need_bytes"]
        assert found["memory"]["predicted_peak_bytes"] <= found["memory"]["ceiling_bytes"]
        found = await explained(stage, model=EMBED_MODEL, max_tokens=None, inputs=3)
        assert (found["decision"], found["request"]["prompt_tokens"]) == ("ADMIT", 48)
        found = await explained(stage, model=RERANK_MODEL, max_tokens=None, inputs=3)
        assert (found["decision"], found["request"]["prompt_tokens"]) == ("ADMIT", 48)
        assert stage.service.status.state() == before
        assert stage.generator.runs == stage.embedder.runs == []
        assert not stage.service.gate.tickets()


async def test_explain_agrees_with_the_decision():
    classes = {"standard": {"default": True, "sheddable": False}, "picky": {"ttft_ms": 1}}
    async with staged(SETTINGS, is_stepped=True, admission={"engine_queue": 0}, classes=classes) as stage:
        body = {"model": CHAT_MODEL, "prompt": [1] * 16, "max_tokens": 8}
        asking = [asyncio.create_task(stage.http.post("/v1/completions", json=body)) for _ in range(4)]
        await stage.generator.until_runs(4)
        found = await explained(stage)
        assert (found["decision"], found["reason"]) == ("DEFER", "no_slot")
        assert (found["places"], found["queue"]) == ({"running": 4, "free": 0}, {"others": 0, "before_it": 0})
        named = {"x-request-id": "mine"}
        asking.append(asyncio.create_task(stage.http.post("/v1/completions", json=body, headers=named)))
        await until(lambda: len(stage.service.gate.dispatcher.queued(Owner.LLM)) == 1)
        (mine,) = await histories(stage, "mine")
        assert (mine["outcome"], mine["phase"]) == (None, "deferred")
        assert (mine["now"]["decision"], mine["now"]["reason"]) == ("DEFER", "no_slot")
        assert (await explained(stage))["queue"] == {"others": 1, "before_it": 1}
        found = await explained(stage, slo={"ttft_ms": 0.001}, service_class="picky")
        assert (found["decision"], found["reason"], found["retry_after_ms"]) == (
            "REJECT", "slo_unattainable", 1000.0,
        )  # fmt: skip
        refused = await stage.http.post(
            "/v1/completions",
            json={**body, "slo": {"ttft_ms": 0.001}, "service_class": "picky"},
            headers={"x-request-id": "late"},
        )
        assert (refused.status_code, refused.headers["retry-after-ms"]) == (429, "1000")
        while not all(task.done() for task in asking):
            stage.generator.allow()
            await asyncio.sleep(0)
        assert [(await task).status_code for task in asking] == [200] * 5
        (mine,) = await histories(stage, "mine")
        assert (mine["outcome"], mine["missed"], mine["now"]) == ("met", [], None)
        assert [(each["decision"], each["reason"]) for each in mine["decisions"]] == [
            ("DEFER", "no_slot"), ("ADMIT", None),
        ]  # fmt: skip
        assert mine["decisions"][0]["places"] == {"running": 4, "free": 0}
        assert mine["decisions"][1]["at_ms"] == mine["measured"]["queue_ms"] > 0
        assert mine["request"]["prompt_tokens"] == 16
        assert mine["measured"]["output_tokens"] == 3
        assert await histories(stage, mine["id"]) == [mine | {"arrived_ms_ago": ANY}]
        (late,) = await histories(stage, "late")
        (decision,) = late["decisions"]
        assert (late["outcome"], decision["reason"]) == ("rejected", "slo_unattainable")
        assert decision["retry_after_ms"] == 1000.0
        assert decision["time"]["latest_start_ms"] < 0


async def histories(stage, request_id):
    answer = await stage.http.get(f"/admin/explain/{request_id}", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()["requests"]


async def test_only_the_last_ended_requests_are_explained():
    async with staged(SETTINGS, server={"explain_requests": 2}) as stage:
        body = {"model": CHAT_MODEL, "prompt": "x"}
        for name in ("first", "second", "third"):
            await stage.http.post("/v1/completions", json=body, headers={"x-request-id": name})
        missing = await stage.http.get("/admin/explain/first", headers=ADMIN)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert "the last 2 requests that ended" in missing.json()["error"]["message"]
        for name in ("second", "third"):
            (found,) = await histories(stage, name)
            assert found["id"].startswith(f"{name}-")


@pytest.mark.parametrize(
    ("said", "status", "expected"),
    [
        ({"prompt_tokens": 1000}, 400, "has a context of 256 tokens"),
        ({"model": EMBED_MODEL, "prompt_tokens": 65}, 400, "accepts at most 64"),
        ({"model": "nope"}, 404, "does not exist"),
        ({"prompt_token": 3}, 400, "did you mean prompt_tokens?"),
        ({"service_class": "gold"}, 400, "no such class"),
    ],
)
async def test_explain_refuses_invalid_requests(said, status, expected):
    async with staged(SETTINGS) as stage:
        answer = await stage.http.post("/admin/explain", json={**ASKED, **said}, headers=ADMIN)
        assert (answer.status_code, expected in answer.json()["error"]["message"]) == (status, True)


async def test_explain_after_a_drain_is_a_rejection():
    async with staged(SETTINGS) as stage:
        await stage.http.post("/admin/drain", headers=ADMIN)
        answer = await stage.http.post("/admin/explain", json=ASKED, headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


async def test_metrics_need_their_key_if_one_is_configured():
    settings = ApiSettings(metrics_key_sha256=sha256(b"scraper").hexdigest())
    async with staged(settings) as stage:
        for headers in ({}, {"authorization": "Bearer other"}):
            answer = await stage.http.get("/metrics", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        answer = await stage.http.get("/metrics", headers={"authorization": "Bearer scraper"})
        assert (answer.status_code, "tandem_requests_shed_total 0.0" in answer.text) == (200, True)
