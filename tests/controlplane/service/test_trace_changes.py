"""The receiver of spans is named, replaced and taken away while the server runs."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from controlplane.config import ConfigError
from tests.controlplane.api.scripted_server import CHAT_MODEL, Stage, staged, until

pytest.importorskip("opentelemetry.proto")

from controlplane.service.tracing import request_tracer
from tests.controlplane.service.otlp_receiver import Receiver, roots

PROMPT = {"model": CHAT_MODEL, "prompt": "hello"}


@pytest.fixture
def other() -> Iterator[Receiver]:
    """A second receiver."""
    found = Receiver()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def exported_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_tracer, "_PERIOD_SECONDS", 0.01)


async def change(stage: Stage, **tracing: Any) -> Any:
    content = {"tracing": {"sample": 1.0, **tracing}}
    return await stage.service.reconfiguration.change(content, source="a test")


async def served(stage: Stage) -> bool:
    """Serves a request; whether it was traced."""
    answer = await stage.http.post("/v1/completions", json=PROMPT)
    assert answer.status_code == 200
    return "traceparent" in answer.headers


async def test_receivers_change_without_a_restart(receiver, other):
    async with staged() as stage:
        assert not await served(stage)
        applied = await change(stage, endpoint=receiver.url)
        assert "tracing.endpoint" in applied.plan.applied and not applied.plan.needs_restart
        assert await served(stage)
        await until(lambda: len(roots(receiver)) == 1)
        await change(stage, endpoint=other.url, service_name="second")
        assert await served(stage)
        await until(lambda: len(roots(other)) == 1)
        await change(stage, endpoint=None)
        assert not await served(stage)
        tracer = stage.service.status.traces.tracer
        # A request counts once the receiver has answered, which is after it has kept the spans.
        await until(lambda: tracer.exported == 2)
        metrics = (await stage.http.get("/metrics")).text
    assert (len(roots(receiver)), len(roots(other))) == (1, 1)
    assert (receiver.resources[0]["service.name"], other.resources[0]["service.name"]) == ("tandem", "second")
    # One tracer counts over all receivers.
    assert tracer.dropped == 0
    assert 'tandem_traced_requests_total{what="exported"} 2.0' in metrics


async def test_a_request_that_began_before_the_receiver_was_taken_away_arrives(receiver):
    async with staged(is_stepped=True, tracing={"endpoint": receiver.url, "sample": 1.0}) as stage:
        asking = asyncio.create_task(served(stage))
        await stage.generator.until_runs(1)
        await change(stage, endpoint=None)
        stage.generator.allow(10)
        assert await asking
    assert len(roots(receiver)) == 1


async def test_a_fault_ends_with_the_receiver_that_had_it(receiver, other):
    receiver.status = 400
    async with staged(tracing={"endpoint": receiver.url, "sample": 1.0}) as stage:
        for following in (other.url, None):
            await served(stage)
            await until(lambda: "tracing" in stage.service.status.impaired())
            assert f"tracing.endpoint={receiver.url}" in stage.service.status.faults()["tracing"]
            await change(stage, endpoint=following)
            assert stage.service.status.impaired() == {}
            await change(stage, endpoint=receiver.url)


async def test_a_fault_lasts_through_changes_that_keep_the_receiver(receiver):
    receiver.status = 400
    async with staged(tracing={"endpoint": receiver.url, "sample": 1.0}) as stage:
        await served(stage)
        await until(lambda: "tracing" in stage.service.status.impaired())
        for content in ({"tracing": {"service_name": "second"}}, {"server": {"overload_status": 503}}):
            await stage.service.reconfiguration.change(content, source="a test")
            assert "tracing" in stage.service.status.impaired()
        receiver.status = 200
        await served(stage)
        await until(lambda: "tracing" not in stage.service.status.impaired())
    assert receiver.resources[0]["service.name"] == "second"


async def test_a_receiver_without_the_extra_changes_nothing(monkeypatch):
    async with staged() as stage:
        monkeypatch.setitem(sys.modules, request_tracer.__name__, None)
        with pytest.raises(ConfigError, match="install the extra otel"):
            await change(stage, endpoint="http://127.0.0.1:9")
        assert stage.service.config.tracing.endpoint is None
        assert not await served(stage)
