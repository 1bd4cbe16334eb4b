"""Traces of requests: what a receiver gets over OTLP, and which requests are kept."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from backends.testing.scripted import ScriptedGenerator
from controlplane.config import ConfigError, parse
from controlplane.config.tracing_section import TracingSection
from controlplane.core.errors import BackendDown
from controlplane.service.request_trace import trace_of
from controlplane.service.runtime.timers import MonotonicClock
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    RERANK_MODEL,
    staged,
)
from tests.controlplane.service.scripted_bench import read

pytest.importorskip("opentelemetry.proto")

from controlplane.service.tracing import request_tracer
from controlplane.service.tracing.request_spans import spans_of
from controlplane.service.tracing.request_tracer import is_remarkable
from tests.controlplane.service.otlp_receiver import Receiver, roots, values

PROMPT = {"model": CHAT_MODEL, "prompt": "hello"}
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{:02x}"


def traced(receiver: Receiver, **sections: Any) -> Any:
    """A stage that traces; its end exports what is queued."""
    return staged(tracing={"endpoint": receiver.url, "sample": 1.0} | sections.pop("tracing", {}), **sections)


async def test_a_completion_is_one_trace_with_its_parts(receiver, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=one%20box,service.name=other")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    async with traced(receiver) as stage:
        headers = {"traceparent": CALLER.format(1), "x-request-id": "mine"}
        answer = await stage.http.post("/v1/chat/completions", headers=headers, json={
            "model": CHAT_MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7,
        })  # fmt: skip
    root, *parts = receiver.spans
    assert answer.headers["traceparent"] == f"00-{root.trace_id.hex()}-{root.span_id.hex()}-01"
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (CALLER[3:35], CALLER[36:52])
    assert (root.name, root.kind) == (f"chat {CHAT_MODEL}", root.SPAN_KIND_SERVER)
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert all(part.parent_span_id == root.span_id and part.trace_id == root.trace_id for part in parts)
    assert len({span.span_id for span in receiver.spans}) == 4
    # The parts follow each other from the arrival on.
    ends = [root.start_time_unix_nano, *(part.end_time_unix_nano for part in parts)]
    assert [part.start_time_unix_nano for part in parts] == ends[:-1]
    assert ends[-1] <= root.end_time_unix_nano
    found = values(root.attributes)
    assert found["gen_ai.request.id"].startswith("mine-")
    counts = {name: found[f"gen_ai.usage.{name}"] for name in ("input_tokens", "prompt_tokens")}
    assert counts == dict.fromkeys(counts, 2)
    assert (found["gen_ai.usage.output_tokens"], found["gen_ai.usage.completion_tokens"]) == (3, 3)
    assert (found["gen_ai.operation.name"], found["gen_ai.request.max_tokens"]) == ("chat", 7)
    assert (found["tandem.outcome"], found["tandem.class"], found["tandem.config_version"]) == (
        "met",
        "standard",
        1,
    )
    assert 0 <= found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.time_to_first_token"]
    assert found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    (decision,) = root.events
    assert (decision.name, values(decision.attributes)["tandem.decision"]) == ("decision", "admit")
    assert receiver.resources[0] | {"service.version": ""} == {
        "service.name": "tandem", "service.version": "", "host.name": "one box",
    }  # fmt: skip
    assert receiver.headers["x-key"] == "secret"


async def test_a_request_to_an_adapter_has_its_name(receiver):
    chat = {"model": CHAT_MODEL, "engine": {"enable_lora": True}, "lora_modules": {"poet": "adapters/poet"}}
    models = {"chat": chat, "embeddings": [{"model": EMBED_MODEL}], "rerankers": [{"model": RERANK_MODEL}]}
    async with traced(receiver, models=models) as stage:
        headers = {"x-request-id": "mine"}
        await stage.http.post("/v1/completions", json=PROMPT | {"model": "poet"}, headers=headers)
        (explained,) = await stage.service.gate.histories("mine")
    assert explained["request"]["model"] == "poet"
    root = receiver.spans[0]
    assert root.name == "text_completion poet"
    assert values(root.attributes)["gen_ai.request.model"] == "poet"


async def test_embeddings_have_their_passes(receiver):
    async with traced(receiver) as stage:
        await stage.http.post("/v1/embeddings", json={"model": EMBED_MODEL, "input": ["a", "b"]})
        await stage.http.post("/v1/rerank", json={"model": RERANK_MODEL, "query": "q", "documents": ["a"]})
    names = [span.name for span in receiver.spans]
    assert names == [
        f"embeddings {EMBED_MODEL}", "queue", "embed", "embedding pass",
        f"rerank {RERANK_MODEL}", "queue", "embed", "embedding pass",
    ]  # fmt: skip
    assert values(receiver.spans[3].attributes)["tandem.pass.inputs"] == 2


@pytest.mark.parametrize("path", ["/embed", "/"])
async def test_a_request_of_text_embeddings_inference_is_named_as_embeddings(receiver, path):
    async with traced(receiver) as stage:
        assert (await stage.http.post(path, json={"inputs": "a"})).status_code == 200
    (root,) = roots(receiver)
    assert root.name == f"embeddings {EMBED_MODEL}"
    assert values(root.attributes)["gen_ai.operation.name"] == "embeddings"


async def test_prompts_of_one_body_share_a_trace(receiver):
    async with traced(receiver) as stage:
        answer = await stage.http.post("/v1/completions", json={**PROMPT, "prompt": ["a", "b"]})
    both = roots(receiver)
    assert len(both) == 2 and len({root.trace_id for root in both}) == 1
    assert len({root.span_id for root in both}) == 2
    assert answer.headers["traceparent"].split("-")[2] in {root.span_id.hex() for root in both}


async def test_what_went_wrong_is_kept_and_the_rest_is_a_share(receiver):
    """At a share of 0 only a rejection, a miss, and what its caller records are exported."""
    classes = {"any": {"default": True, "sheddable": False}, "fast": {"ttft_ms": 0.001, "sheddable": False}}
    async with traced(receiver, tracing={"sample": 0.0}, classes=classes) as stage:
        plain = await stage.http.post("/v1/completions", json=PROMPT)
        await stage.http.post("/v1/completions", json={**PROMPT, "service_class": "fast"})
        await stage.http.post("/v1/completions", json=PROMPT, headers={"traceparent": CALLER.format(0)})
        await stage.http.post("/v1/completions", json=PROMPT, headers={"traceparent": CALLER.format(1)})
        stage.service.gate.is_closed = True
        await stage.http.post("/v1/completions", json=PROMPT)
        stage.service.gate.is_closed = False
        tracer = stage.service.status.traces.tracer
    kept = roots(receiver)
    found = [values(root.attributes) for root in kept]
    assert [(each["tandem.outcome"], each.get("tandem.missed", [])) for each in found] == [
        ("late", ["ttft"]), ("met", []), ("rejected", []),
    ]  # fmt: skip
    assert found[2]["error.type"] == "shutting_down"
    assert kept[2].status.code == kept[2].status.STATUS_CODE_ERROR
    assert plain.headers["traceparent"].endswith("-00")
    assert (tracer.exported, tracer.dropped) == (3, 0)


def test_a_preemption_is_kept_with_its_time(bench):
    async def scenario(b):
        for tokens in (60, 60):
            victim = await b.ask(max_tokens=tokens, service_class="batch")
            reading = asyncio.create_task(read(victim))
            await b.generator.until_runs(1)
            await asyncio.sleep(1.0)
            await read(await b.ask(max_tokens=2, service_class="interactive"))
            await reading

    generator = ScriptedGenerator(max_running=1, prefill_seconds=0.1, token_seconds=0.1)
    b = bench(scenario, generator=generator, admission={"engine_queue": 0})
    victim = next(ticket for ticket in b.ended if ticket.preemptions)
    assert is_remarkable(victim)
    root, *parts = spans_of(victim, trace_of(None, "/v1/completions", 0.0), epoch_ns=0)
    assert [part.name for part in parts] == ["queue", "prefill", "decode", "preempted"]
    decode, preempted = parts[2:]
    begin, end = preempted.start_time_unix_nano, preempted.end_time_unix_nano
    assert decode.start_time_unix_nano < begin < end < decode.end_time_unix_nano
    assert [event.name for event in root.events] == ["decision", "preemption", "decision"]
    found = values(preempted.attributes)
    assert found["tandem.preempted.by"] == "gate"
    assert found["tandem.preempted.for"] in [ticket.request.id for ticket in b.ended]


async def test_a_receiver_that_fails_costs_traces_only(receiver, caplog):
    receiver.status = 400
    async with traced(receiver) as stage:
        assert (await stage.http.post("/v1/completions", json=PROMPT)).status_code == 200
        tracer = stage.service.status.traces.tracer
    assert (tracer.exported, tracer.dropped) == (0, 1)
    assert caplog.text.count("spans cannot be exported") == 1


async def test_a_full_queue_drops_and_counts(receiver, monkeypatch):
    monkeypatch.setattr(request_tracer, "_QUEUED_REQUESTS", 1)
    monkeypatch.setattr(request_tracer, "_PERIOD_SECONDS", 60.0)
    async with traced(receiver) as stage:
        for _ in range(3):
            await stage.http.post("/v1/completions", json=PROMPT)
        tracer = stage.service.status.traces.tracer
        assert (len(tracer._kept), tracer.dropped) == (1, 2)
        metrics = (await stage.http.get("/metrics")).text
    assert 'tandem_traced_requests_total{what="dropped"} 2.0' in metrics
    assert (tracer.exported, tracer.dropped) == (1, 2)


def test_requests_that_two_threads_drop_at_once_are_all_counted(monkeypatch):
    """The event loop may drop one while the thread adds those of an export that has failed."""
    monkeypatch.setattr(request_tracer, "_QUEUED_REQUESTS", 0)
    tracer = request_tracer.RequestTracer(TracingSection(), "http://localhost:4318", MonotonicClock())
    ended = SimpleNamespace(request=SimpleNamespace(id="a"), trace=SimpleNamespace(is_sampled=True))

    class Interrupted(list):
        def __len__(self) -> int:
            tracer.request_ended(ended)
            return super().__len__()

    def refuse(url: str, message: bytes) -> None:
        raise BackendDown("refused")

    monkeypatch.setattr(tracer, "_send", refuse)
    tracer._export(Interrupted([(SimpleNamespace(trace=None), ())] * 3))
    assert tracer.dropped == 4


async def test_passes_of_requests_that_never_end_are_bounded(receiver, monkeypatch):
    monkeypatch.setattr(request_tracer, "_REQUESTS_WITH_PASSES", 2)
    async with traced(receiver) as stage:
        for _ in range(4):
            await stage.http.post("/v1/embeddings", json={"model": EMBED_MODEL, "input": "a"})
        tracer = stage.service.status.traces.tracer
        assert not tracer._passes


async def test_without_an_endpoint_nothing_is_traced():
    async with staged() as stage:
        answer = await stage.http.post(
            "/v1/completions", json=PROMPT, headers={"traceparent": CALLER.format(1)}
        )
        assert "traceparent" not in answer.headers
        assert stage.service.status.traces.tracer is None


@pytest.mark.parametrize(
    "header",
    [
        None, b"", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331", CALLER.format(1).upper().encode(),
        b"ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", CALLER.format(1).encode() + b"-more",
        b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01",
        b"00-0af7651916cd43dd8448eb211c80319c-" + b"0" * 16 + b"-01",
    ],
)  # fmt: skip
def test_a_malformed_header_counts_as_none(header):
    found = trace_of(header, "/v1/completions", 0.0)
    assert found.parent_id is None and not found.is_sampled and found.trace_id


def test_a_header_of_a_later_version_is_understood():
    found = trace_of(CALLER.format(1).replace("00-", "01-", 1).encode() + b"-more", "/", 0.0)
    assert (found.trace_id, found.is_sampled) == (int(CALLER[3:35], 16), True)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_share_is_that_of_the_requests(share):
    count = sum(trace_of(None, "/", share).is_sampled for _ in range(4_000))
    assert abs(count / 4_000 - share) < 0.05


def test_an_endpoint_is_a_url():
    models = {"chat": {"model": "m"}}
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        parse({"models": models, "tracing": {"endpoint": "localhost:4318"}})
