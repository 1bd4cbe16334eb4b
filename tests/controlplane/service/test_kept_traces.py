"""Requests that go wrong or are preempted arrive at the receiver, although none is sampled."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import httpx
import pytest

from backends.testing.scripted import Script
from controlplane.core.engine_reports import EnginePreemption
from controlplane.core.text_limits import LONG_TEXT_CHARACTERS
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    MAX_RUNNING,
    Stage,
    at_a_slow_pace,
    staged,
    until,
)

pytest.importorskip("opentelemetry.proto")

from tests.controlplane.service.otlp_receiver import Receiver, roots, values

CLASSES = {
    "interactive": {"priority": 5, "ttft_ms": 5_000},
    "batch": {"priority": 0, "sheddable": False, "default": True},
}
TENANTS = {"web": {"api_keys_sha256": [sha256(b"tenant").hexdigest()], "requests_per_minute": 1}}
KEY = {"authorization": "Bearer tenant"}


@asynccontextmanager
async def unsampled(receiver: Receiver, *, has_served: bool = True, **sections: Any) -> AsyncIterator[Stage]:
    """A stepped stage at a share of 0; if it `has_served` a request, the spans of that are not sent."""
    headers = KEY if "tenants" in sections else {}
    tracing = {"endpoint": receiver.url, "sample": 0.0}
    async with staged(is_stepped=True, tracing=tracing, **sections) as stage:
        if has_served:
            plain = stage.http.post("/v1/completions", json=body("hello"), headers=headers)
            assert await finished(stage, [asyncio.create_task(plain)]) == [200]
        yield stage
        tracer = stage.service.status.traces.tracer
    assert tracer is not None and (tracer.exported, tracer.dropped) == (len(roots(receiver)), 0)


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": CHAT_MODEL, "prompt": prompt, **more}


def ask(stage: Stage, name: str, **more: Any) -> asyncio.Task[httpx.Response]:
    call = stage.http.post("/v1/completions", json=body("hello", **more), headers={"x-request-id": name})
    return asyncio.create_task(call)


async def finished(stage: Stage, asking: Sequence[asyncio.Task[httpx.Response]]) -> list[int]:
    """The statuses of the answers; the LLM takes as many steps as they need."""
    while not all(task.done() for task in asking):
        stage.generator.allow()
        await asyncio.sleep(0)
    return [task.result().status_code for task in asking]


def only(receiver: Receiver) -> dict[str, Any]:
    """The attributes of the only request that arrived."""
    (root,) = roots(receiver)
    return values(root.attributes)


async def test_a_request_that_the_gate_preempted(receiver):
    sections = {"classes": CLASSES, "admission": {"engine_queue": 0}}
    # Fast tokens of an earlier request would bound what is learned from the slow ones.
    async with unsampled(receiver, has_served=False, **sections) as stage:
        stage.generator.default = Script(tokens=60)
        batch = [ask(stage, f"batch-{n}", max_tokens=60) for n in range(MAX_RUNNING)]
        await stage.generator.until_runs(MAX_RUNNING)
        await at_a_slow_pace(stage)
        urgent = ask(stage, "urgent", max_tokens=3, service_class="interactive")
        await stage.generator.until_runs(MAX_RUNNING + 1)
        assert await finished(stage, [*batch, urgent]) == [200] * 5
    found = only(receiver)
    assert found["gen_ai.request.id"].startswith("batch-")
    assert (found["tandem.outcome"], found["tandem.preemptions"]) == ("met", 1)
    assert "preempted" in [span.name for span in receiver.spans]


async def test_a_request_that_the_engine_preempted(receiver):
    """Also if it goes on before anything else is decided."""
    async with unsampled(receiver, scheduling={"engine": {}}) as stage:
        asking = ask(stage, "victim", max_tokens=9)
        await stage.generator.until_runs(2)
        (ticket,) = stage.service.gate.dispatcher.tickets()
        now = stage.service.gate.clock.now()
        stage.generator.preempted.append(EnginePreemption(now, ticket.request.id, None, 5))
        assert await finished(stage, [asking]) == [200]
    found = only(receiver)
    assert (found["tandem.outcome"], found["tandem.preemptions"]) == ("met", 1)
    (event,) = [event for event in roots(receiver)[0].events if event.name == "preemption"]
    assert values(event.attributes)["tandem.preempted.by"] == "engine"
    assert values(event.attributes)["tandem.preempted.recompute_tokens"] == 5


async def test_requests_that_were_evicted(receiver):
    async with unsampled(receiver) as stage:
        texts = stage.http.post("/v1/embeddings", json={"model": EMBED_MODEL, "input": "a"})
        asking = [ask(stage, "evicted"), asyncio.create_task(texts)]
        await stage.generator.until_runs(2)
        await stage.embedder.until_runs(1)
        await stage.service.gate.drain(0.01)
        assert await finished(stage, asking) == [503, 503]
    found = [values(root.attributes) for root in roots(receiver)]
    assert {each["gen_ai.operation.name"] for each in found} == {"text_completion", "embeddings"}
    assert {(each["tandem.outcome"], each["error.type"]) for each in found} == {("evicted", "shutting_down")}


@pytest.mark.parametrize(
    ("script", "status"), [(Script(request_fails_after=1), 500), (Script(engine_fails_after=1), 503)]
)
async def test_a_request_that_failed(receiver, script, status):
    async with unsampled(receiver) as stage:
        stage.generator.upcoming.append(script)
        assert await finished(stage, [ask(stage, "unlucky")]) == [status]
        await until(lambda: stage.generator.down is None)
    root = roots(receiver)[0]
    assert (only(receiver)["tandem.outcome"], only(receiver)["error.type"]) == ("failed", "failed")
    assert (root.status.code, root.status.message) == (root.status.STATUS_CODE_ERROR, "failed")


@pytest.mark.parametrize("characters", [5, LONG_TEXT_CHARACTERS + 1])
async def test_a_request_that_exceeds_the_rate_of_its_tenant(receiver, characters):
    """One with a long text is rejected before the text is tokenized."""
    async with unsampled(receiver, tenants=TENANTS) as stage:
        stage.generator.max_model_tokens = 2 * LONG_TEXT_CHARACTERS
        answer = await stage.http.post("/v1/completions", json=body("x" * characters), headers=KEY)
        assert answer.status_code == 429
    assert (only(receiver)["tandem.outcome"], only(receiver)["error.type"]) == ("rejected", "rate_limited")


async def test_a_request_that_is_rejected_by_a_full_queue(receiver):
    async with unsampled(receiver, admission={"engine_queue": 0, "max_waiting": 1}) as stage:
        running = [ask(stage, f"running-{n}") for n in range(MAX_RUNNING)]
        await stage.generator.until_runs(1 + MAX_RUNNING)
        waiting = [ask(stage, f"waiting-{n}") for n in range(2)]
        await until(lambda: any(task.done() for task in waiting))
        assert sorted(await finished(stage, [*running, *waiting])) == [200] * 5 + [429]
    assert (only(receiver)["tandem.outcome"], only(receiver)["error.type"]) == ("rejected", "queue_full")
