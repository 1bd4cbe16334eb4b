"""Rejections, engine failures and disconnects: status, code, headers, and that no lease remains."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import orjson
import pytest

from backends.testing.scripted import Script
from controlplane.api.errors import failure_of
from controlplane.core.clock import milliseconds
from controlplane.core.decision import Reason, Reject
from controlplane.core.errors import BackendDown, BackendFailed, NoMemory, WorkerDied
from controlplane.core.slo import Slo
from controlplane.log_output import LogRateLimiter
from controlplane.metrics import DECISIONS
from controlplane.service.ticket import Rejected
from tests.controlplane.api.example_bodies import CHAT, EMBED, TEXT, chat, text
from tests.controlplane.api.scripted_server import (
    EMBED_MODEL,
    MAX_RUNNING,
    WORDS,
    Stage,
    listening,
    staged,
    until,
)
from tests.example_requests import a_request

# reason, status, code, drop reason
REJECTIONS = [
    (Reason.QUEUE_FULL, 429, "overloaded", "rejected-saturated"),
    (Reason.SLO_UNATTAINABLE, 429, "slo_unattainable", "rejected-saturated"),
    (Reason.DEVICE_TIME, 429, "device_time", "rejected-saturated"),
    (Reason.QUEUE_TIMEOUT, 429, "queue_timeout", "rejected-ttl-expired"),
    (Reason.RATE_LIMITED, 429, "rate_limit_exceeded", "rejected-saturated"),
    (Reason.SHUTTING_DOWN, 503, "shutting_down", "rejected-shutting-down"),
    (Reason.NEVER_FITS, 400, "context_length_exceeded", None),
    (Reason.ENGINE_DOWN, 503, "backend_down", None),
]


def rejected(reason: Reason, retry_after_ms: float | None) -> Rejected:
    retry_after = None if retry_after_ms is None else milliseconds(retry_after_ms)
    return Rejected(a_request(), Reject(reason, retry_after, "7 of 5"))


@pytest.mark.parametrize(("reason", "status", "code", "dropped"), REJECTIONS)
def test_every_reason_has_a_status_and_a_message(reason: Reason, status: int, code: str, dropped: str | None):
    failure = failure_of(rejected(reason, 1500.2), overload_status=429)
    assert (failure.status, failure.code) == (status, code)
    assert failure.headers.get("x-llm-d-request-dropped-reason") == dropped
    assert failure.headers["retry-after-ms"] == "1501"
    assert failure.headers["retry-after"] == "2"
    assert ": 7 of 5" in failure.message
    assert reason is Reason.NEVER_FITS or "; retry after 1.501 s" in failure.message


def test_a_reason_that_only_a_plug_in_gives_has_a_status_and_a_message():
    failure = failure_of(rejected(Reason.NO_SLOT, 1500.2), overload_status=429)
    assert (failure.status, failure.code) == (429, "overloaded")
    assert failure.message == "the request cannot be served now: 7 of 5; retry after 1.501 s"


def test_slo_rejection_names_the_objective_and_the_remedies():
    request = replace(rejected(Reason.SLO_UNATTAINABLE, 1).request, slo=Slo(ttft=milliseconds(500)))
    error = Rejected(request, Reject(Reason.SLO_UNATTAINABLE, milliseconds(4_000)))
    assert failure_of(error, overload_status=429).message == (
        "the request is predicted to miss its objective (TTFT 500 ms); "
        "retry after 4 s, relax the objective or use another service class"
    )


def test_evicted_and_rejected_requests_have_different_drop_reasons():
    said = rejected(Reason.SLO_UNATTAINABLE, 1)
    failure = failure_of(Rejected(said.request, said.reject, is_evicted=True), overload_status=429)
    assert (failure.status, failure.code) == (429, "slo_unattainable")
    assert failure.headers["x-llm-d-request-dropped-reason"] == "evicted-queue-pressure"
    decisions = [
        failure_of(each, overload_status=429).headers["x-tandem-decision"]
        for each in (said, Rejected(said.request, said.reject, is_evicted=True))
    ]
    assert decisions == ["REJECT", "EVICT"]


def test_every_reason_of_a_rejection_or_eviction_is_in_the_table():
    decided = {each for decisions in DECISIONS.values() for each in decisions}
    assert {reason for reason, *_ in REJECTIONS} == {
        reason for decision, reason in decided if decision in ("REJECT", "EVICT")
    }


@pytest.mark.parametrize(
    ("wait_ms", "in_ms", "in_seconds"), [(0.2, "1", "1"), (1000, "1000", "1"), (1000.1, "1001", "2")]
)
def test_retry_after_is_whole_seconds_and_at_least_one(wait_ms: float, in_ms: str, in_seconds: str):
    headers = failure_of(rejected(Reason.QUEUE_FULL, wait_ms), overload_status=429).headers
    assert (headers["retry-after-ms"], headers["retry-after"]) == (in_ms, in_seconds)


def test_should_retry_is_false_when_a_retry_cannot_help():
    headers = failure_of(rejected(Reason.QUEUE_FULL, None), overload_status=429).headers
    assert headers["x-should-retry"] == "false"
    assert "retry-after" not in headers


def test_the_overload_status_is_configurable():
    assert failure_of(rejected(Reason.QUEUE_FULL, 1), overload_status=503).status == 503
    assert failure_of(rejected(Reason.RATE_LIMITED, 1), overload_status=503).status == 429


async def test_defect_in_the_gate_is_a_500_and_logged_once(caplog: pytest.LogCaptureFixture):
    def faulty(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    async with staged() as stage:
        stage.service.gate.on_arrival = faulty
        for path, body in ((CHAT, chat()), (EMBED, {"model": EMBED_MODEL, "input": "hi"})):
            caplog.clear()
            answer = await stage.http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
            assert "a defect" not in answer.text
            lines = caplog.text.count("requests fail without a decision")
            assert caplog.text.count("Traceback") == lines <= 1
        assert (await stage.http.get("/ready")).json()["impaired"] == {"decisions": "defect"}


NO_QUEUE = {"max_waiting": 0, "engine_queue": 0}


async def busy(http: httpx.AsyncClient, stage: Stage) -> list[asyncio.Task[httpx.Response]]:
    """Fills every slot of the engine."""
    running = [asyncio.create_task(http.post(CHAT, json=chat())) for _ in range(MAX_RUNNING)]
    await stage.generator.until_runs(MAX_RUNNING)
    return running


async def all_done(stage: Stage, running: list[asyncio.Task[httpx.Response]]) -> None:
    stage.generator.allow(len(WORDS))
    assert [done.status_code for done in await asyncio.gather(*running)] == [200] * len(running)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_full_queue_rejects_with_retry_after(is_streamed: bool):  # noqa: FBT001
    async with staged(is_stepped=True, admission=NO_QUEUE) as stage:
        running = await busy(stage.http, stage)
        answer = await stage.http.post(CHAT, json=chat(stream=is_streamed))
        assert answer.status_code == 429, answer.text
        assert answer.json()["error"]["code"] == "overloaded"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
        assert int(answer.headers["retry-after-ms"]) >= 1
        assert answer.headers["x-tandem-decision"] == "REJECT"
        await all_done(stage, running)


async def test_one_rejected_prompt_aborts_the_others():
    async with staged(is_stepped=True, admission=NO_QUEUE) as stage:
        answer = await stage.http.post(TEXT, json=text(prompt=["p"] * 5))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert {run.end for run in stage.generator.runs} <= {"aborted"}


async def test_deferred_request_has_the_decision_header():
    async with staged(is_stepped=True, admission={"engine_queue": 0}) as stage:
        running = await busy(stage.http, stage)
        late = asyncio.create_task(stage.http.post(CHAT, json=chat(stream=True)))
        await until(lambda: len(stage.service.gate.tickets()) == MAX_RUNNING + 1)
        await all_done(stage, running)
        await stage.generator.until_runs(MAX_RUNNING + 1)
        await all_done(stage, [late])
        assert late.result().headers["x-tandem-decision"] == "DEFER"
        assert float(late.result().headers["x-tandem-queue-ms"]) > 0


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("script", "status", "code", "outcome"),
    [
        (Script(engine_fails_after=0), 503, "backend_down", "failed"),
        (Script(request_fails_after=0), 500, "backend_failed", "failed"),
        (Script(refusal="not with this sampler"), 400, "invalid_value", "aborted"),
    ],
)
async def test_an_engine_that_fails_before_its_first_token(
    stage: Stage,
    script: Script,
    status: int,
    code: str,
    outcome: str,
    is_streamed: bool,  # noqa: FBT001
):
    stage.generator.default = script
    answer = await stage.http.post(CHAT, json=chat(stream=is_streamed))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert ended(stage, "generate", outcome) == 1


async def test_refusal_by_the_embedding_engine_is_not_a_failure(stage: Stage):
    stage.embedder.upcoming.append(Script(refusal="no such token id"))
    answer = await stage.http.post("/v1/embeddings", json={"model": EMBED_MODEL, "input": [1]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert ended(stage, "embed", "aborted") == 1
    assert stage.service.gate.dispatcher.recorder.attainment.now() == {}


def ended(stage: Stage, kind: str, outcome: str) -> float | None:
    labels = {"class": "standard", "kind": kind, "outcome": outcome}
    return stage.service.status.metrics.registry.get_sample_value("tandem_requests_total", labels)


@pytest.mark.parametrize(
    "failure",
    [
        BackendDown("/secret/path"),
        BackendFailed("CUDA error at /secret/path"),
        NoMemory("CUDA error at /secret/path", position=3),
        RuntimeError("/secret/path"),
    ],
)
def test_backend_error_texts_reach_only_the_log(failure: Exception, caplog: pytest.LogCaptureFixture):
    assert "/secret" not in failure_of(failure, overload_status=429).message
    assert "/secret" in caplog.text


def test_dead_engine_is_not_logged_with_every_request(caplog: pytest.LogCaptureFixture):
    """By the filter that the handler of the server has."""
    caplog.handler.addFilter(limiter := LogRateLimiter())
    for _ in range(50):
        failure_of(BackendDown("it died in the night"), overload_status=429)
    caplog.handler.removeFilter(limiter)
    assert caplog.text.count("it died in the night") == 1


def test_error_names_the_failed_input_and_out_of_memory():
    failed, starved = (
        failure_of(kind("it broke", position=3), overload_status=429) for kind in (BackendFailed, NoMemory)
    )
    assert (failed.status, failed.code) == (500, "backend_failed")
    assert "at input[3]; " in failed.message
    assert (starved.status, starved.code, starved.param) == (503, "out_of_memory", "input")
    assert "input[3] does not fit" in starved.message


def test_restarting_engine_gives_retry_after():
    found = failure_of(BackendDown("another is starting", retry_after=6.2), overload_status=429)
    assert (found.status, found.headers) == (503, {"retry-after-ms": "6200", "retry-after": "7"})
    assert "can safely be sent again: retry after 6.2 s" in found.message


def test_a_request_of_which_two_workers_died_is_named():
    found = failure_of(WorkerDied("worker 7 died", retry_after=6.2), overload_status=429)
    assert (found.status, found.code, found.headers) == (503, "worker_died", {"x-should-retry": "false"})
    assert "divide its inputs" in found.message


def test_engine_down_without_a_known_end_gives_a_default_retry_after():
    found = failure_of(BackendDown("it is dead"), overload_status=429)
    assert found.headers == {"retry-after-ms": "5000", "retry-after": "5"}
    assert "retry after 5 s" in found.message


@pytest.mark.parametrize("body", [chat(stream=True), text(stream=True), text(stream=True, prompt=["a", "b"])])
async def test_stream_that_fails_midway_ends_with_an_error_event(body: dict[str, Any]):
    path = CHAT if "messages" in body else TEXT
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    async with (
        staged(is_stepped=True) as stage,
        listening(stage.app) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        stage.generator.default = Script(engine_fails_after=1)
        asking = asyncio.create_task(http.send(http.build_request("POST", path, json=body), stream=True))
        await stage.generator.until_runs(prompts)
        stage.generator.allow(1)
        answer = await asking
        assert answer.status_code == 200
        stage.generator.allow(1)
        received = (await answer.aread()).decode()
    *_, last = [block for block in received.split("\n\n") if block]
    kind, content = last.split("\n")
    assert kind == "event: error"
    assert orjson.loads(content.removeprefix("data: "))["error"]["code"] == "backend_down"
    assert "[DONE]" not in received


async def test_an_embedding_engine_that_fails(stage: Stage):
    body = {"model": EMBED_MODEL, "input": "hi"}
    stage.embedder.upcoming.append(Script(request_fails_after=0))
    assert (await stage.http.post(EMBED, json=body)).status_code == 500
    stage.embedder.upcoming.append(Script(engine_fails_after=0))
    answer = await stage.http.post(EMBED, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "backend_down")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (CHAT, chat(stream=True)),
        (TEXT, text(prompt=["a", "b", "c"])),
        (TEXT, text(prompt=["a", "b", "c"], stream=True)),
        (EMBED, {"model": EMBED_MODEL, "input": "hi"}),
    ],
)
async def test_disconnect_aborts_the_request(path: str, body: dict[str, Any]):
    async with (
        staged(is_stepped=True) as stage,
        listening(stage.app) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        engine = stage.embedder if path == EMBED else stage.generator
        asking = asyncio.create_task(http.post(path, json=body))
        await engine.until_runs(len(body["prompt"]) if path == TEXT else 1)
        asking.cancel()
        await until(stage.is_clean)
        assert {run.end for run in engine.runs} == {"aborted"}


async def test_disconnect_removes_a_waiting_request():
    async with (
        staged(is_stepped=True, admission={"engine_queue": 0}) as stage,
        listening(stage.app) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        running = await busy(http, stage)
        late = asyncio.create_task(http.post(CHAT, json=chat()))
        await until(lambda: len(stage.service.gate.tickets()) == MAX_RUNNING + 1)
        late.cancel()
        await until(lambda: len(stage.service.gate.tickets()) == MAX_RUNNING)
        assert len(stage.generator.runs) == MAX_RUNNING
        await all_done(stage, running)


async def test_concurrent_requests_may_share_a_request_id():
    async with staged(is_stepped=True) as stage:
        ask = partial(stage.http.post, CHAT, json=chat(), headers={"x-request-id": "same"})
        asking = [asyncio.create_task(ask()) for _ in range(2)]
        await stage.generator.until_runs(2)
        assert len({run.request.id for run in stage.generator.runs}) == 2
        await all_done(stage, asking)
        assert [done.result().headers["x-request-id"] for done in asking] == ["same", "same"]


async def test_new_requests_are_rejected_while_draining(stage: Stage):
    await stage.service.gate.drain(1.0)
    answer = await stage.http.post(CHAT, json=chat())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-shutting-down"


async def test_embeddings_that_outlast_the_drain_get_a_503():
    async with staged(is_stepped=True) as stage:
        asking = asyncio.create_task(stage.http.post(EMBED, json={"model": EMBED_MODEL, "input": "hi"}))
        await stage.embedder.until_runs(1)
        await stage.service.gate.drain(0.01)
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["x-llm-d-request-dropped-reason"] == "evicted"
        assert ended(stage, "embed", "evicted") == 1
