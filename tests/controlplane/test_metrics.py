"""Prometheus conventions: totals are counters that start at 0, unknown values are absent."""

import asyncio
from math import inf

from prometheus_client.parser import text_string_to_metric_families

from benchmark_control_plane.judge.memory_sampler import GAUGES, TOTALS
from controlplane.config.limits_section import LimitsSection
from controlplane.core.clock import milliseconds
from controlplane.core.decision import Outcome, Reason
from controlplane.core.errors import Refused
from controlplane.core.request import Kind
from controlplane.core.slo import ServiceClass, Slo
from controlplane.metrics import UNREAD, Metrics
from controlplane.service.prediction.fail_open import Subject
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage, staged

ORDERS = {"pool": {"kv_allocator": "kvcached"}, "quota": {"tick_ms": 10_000}}
TOTAL_SERIES = {
    "tandem_device_alerts",
    "tandem_device_read_failures",
    "tandem_embedding_out_of_memory",
    "tandem_embedding_restarts",
    "tandem_engine_preemptions",
    "tandem_engine_recompute_tokens",
    "tandem_engine_stalls",
    "tandem_quota_failures",
    "tandem_quota_moves",
    "tandem_reclaimed_bytes",
}


async def page(stage: Stage) -> str:
    return (await stage.http.get("/metrics")).text


async def test_totals_are_counters():
    async with staged(**ORDERS) as stage:
        stage.service.quota_controller.health.failed(Refused("no such quota"))
        stage.service.quota_controller.moves = 3
        text = await page(stage)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {families[name].type for name in TOTAL_SERIES} == {"counter"}
    assert 'tandem_quota_failures_total{fault="refused"} 1.0' in text
    assert "tandem_quota_moves_total 3.0" in text
    assert 'tandem_reclaimed_bytes_total{owner="llm"} 0.0' in text
    for family in families.values():
        is_total = any(sample.name.endswith("_total") for sample in family.samples)
        assert not is_total or family.type == "counter", family.name
        assert family.name.startswith("tandem_") and family.documentation
        assert not family.name.endswith(("_ms", "_milliseconds", "_kib", "_mib"))


def counted(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Values of the labelled counters, by their label values in order of label name."""
    return {
        family.name: {
            tuple(one.labels[key] for key in sorted(one.labels)): one.value for one in family.samples
        }
        for family in text_string_to_metric_families(text)
        if family.type == "counter" and any(one.labels for one in family.samples)
    }


async def test_counters_start_at_zero():
    classes = {
        "quick": {"ttft_ms": 500, "tpot_ms": 50, "gap_ms": 400, "default": True},
        "slow": {"e2e_ms": 1_000},
        "any": {},
    }
    async with staged(classes=classes) as stage:
        found = counted(await page(stage))
    assert {value for series in found.values() for value in series.values()} == {0.0}
    ends = {(name, kind, end.value) for name in classes for kind in Kind for end in Outcome}
    ends |= {(UNREAD, kind, Outcome.REJECTED.value) for kind in Kind}
    assert found["tandem_requests"].keys() == ends
    stated = {("quick", "generate", name) for name in ("ttft", "tpot", "gap")}
    stated |= {("quick", "embed", "ttft"), *(("slow", kind, "e2e") for kind in Kind)}
    assert found["tandem_slo_attained"].keys() == found["tandem_slo_missed"].keys() == stated
    for name in ("preemptions", "prefix_cache_queries", "prefix_cache_hits"):
        assert found[f"tandem_{name}"].keys() == {(name,) for name in classes}
    assert found["tandem_predictor_failures"].keys() == {(subject.value,) for subject in Subject}
    assert {reason for *_, reason in found["tandem_decisions"]} == {"none", *Reason}
    assert ("DEFER", "embed", "no_pace") not in found["tandem_decisions"]


async def test_events_create_no_new_series():
    async with staged(classes={"quick": {"ttft_ms": 0.001, "default": True}}) as stage:
        before = counted(await page(stage))
        for path, body in (
            ("completions", {"model": CHAT_MODEL, "prompt": "x"}),
            ("embeddings", {"model": EMBED_MODEL, "input": "x"}),
        ):
            await stage.http.post(f"/v1/{path}", json=body)
        await stage.service.drain()
        await stage.http.post("/v1/completions", json={"model": CHAT_MODEL, "prompt": "x"})
        after = counted(await page(stage))
    assert before != after
    assert {name: series.keys() for name, series in before.items()} == {
        name: series.keys() for name, series in after.items()
    }


def test_kinds_that_are_not_served_have_no_series():
    some = ServiceClass("some", Slo(tpot=milliseconds(50)), priority=0, sheddable=True)
    found = counted(Metrics([some], [Kind.EMBED]).exposition({}).decode())
    assert found.keys() == {"tandem_decisions", "tandem_requests"}
    assert {kind for _, kind, _ in (found["tandem_requests"] | found["tandem_decisions"])} == {"embed"}


async def test_gauges_of_a_dead_engine_are_absent():
    async with staged() as stage:
        assert 'tandem_engine_used_bytes{owner="llm"} 0.0' in await page(stage)
        stage.generator.on_start = asyncio.Event().wait
        stage.generator.die()
        assert "tandem_engine_used_bytes{" not in await page(stage)


def test_the_largest_request_that_is_served_is_within_a_token_bucket():
    metrics = Metrics()
    largest = LimitsSection().max_pair_tokens
    metrics._prompt.labels("standard", Kind.EMBED).observe(largest)
    families = text_string_to_metric_families(metrics.exposition({}).decode())
    [prompts] = [family for family in families if family.name == "tandem_request_prompt_tokens"]
    counts = {float(one.labels["le"]): one.value for one in prompts.samples if "le" in one.labels}
    assert [bound for bound, count in counts.items() if count] == [4**11, inf]


def test_totals_and_gauges_that_the_judge_reads_exist():
    exposition = Metrics().exposition({}).decode()
    read = {name.decode() for name in TOTALS if name.startswith(b"tandem_")}
    assert read and {name for name in read if f"# TYPE {name} counter" in exposition} == read
    gauges = {f"tandem_{name}" for name in GAUGES}
    assert gauges and {name for name in gauges if f"# TYPE {name} gauge" in exposition} == gauges


async def test_an_answer_with_too_long_a_pause_ends_late():
    # The mean per token and the first token are in time; each pause is longer than a microsecond.
    classes = {"chat": {"tpot_ms": 60_000, "gap_ms": 0.001, "default": True}}
    async with staged(classes=classes) as stage:
        body = {"model": CHAT_MODEL, "prompt": "x", "max_tokens": 4}
        for objectives in ({}, {"x-slo-gap-ms": "60000"}):
            answer = await stage.http.post("/v1/completions", json=body, headers=objectives)
            assert answer.status_code == 200, answer.text
        text = await page(stage)
    found = counted(text)
    assert found["tandem_requests"]["chat", "generate", "late"] == 1
    assert found["tandem_requests"]["chat", "generate", "met"] == 1
    assert found["tandem_slo_missed"] == {
        ("chat", "generate", "tpot"): 0.0, ("chat", "generate", "gap"): 1.0,
    }  # fmt: skip
    assert found["tandem_slo_attained"]["chat", "generate", "gap"] == 1
    assert 'tandem_longest_token_gap_seconds_count{class="chat",kind="generate"} 2.0' in text
