"""Series under vLLM's names: present only if asked for, and equal to Tandem's own."""

import asyncio
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from controlplane.core.kv_geometry import KvGeometry
from controlplane.metrics import Metrics
from controlplane.vllm_metric_names import DESCRIPTIONS, SERIES, vllm_families
from tests.controlplane.api.operations.test_admin import ADMIN, SETTINGS
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, WORDS, Stage, staged

ON = {"server": {"vllm_metric_names": True}}
LABELS = {"model_name": CHAT_MODEL, "engine": "0"}
GEOMETRY = KvGeometry(elements_per_token=8, bytes_per_element=2, block_tokens=16)


async def families(stage: Stage) -> dict[str, Metric]:
    text = (await stage.http.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(found: dict[str, Metric], name: str, **labels: str) -> float:
    """The one sample of this name and these labels."""
    samples = [one for family in found.values() for one in family.samples]
    [one] = [one for one in samples if one.name == name and one.labels.items() >= labels.items()]
    return one.value


async def ask(stage: Stage, path: str, body: dict[str, Any]) -> None:
    answer = await stage.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text


async def test_they_are_absent_by_default_and_appear_when_the_key_is_set_at_run_time():
    async with staged(SETTINGS) as stage:
        assert not any(name.startswith("vllm:") for name in await families(stage))
        change = await stage.http.put("/admin/config", json=ON, headers=ADMIN)
        assert change.status_code == 200, change.text
        assert "vllm:num_requests_running" in await families(stage)


async def test_they_count_the_chat_model_over_all_classes_and_no_embeddings():
    classes = {"quick": {"default": True}, "slow": {}}
    async with staged(classes=classes, **ON) as stage:
        for name in classes:
            await ask(stage, "completions", {"model": CHAT_MODEL, "prompt": "Hello", "service_class": name})
        await ask(stage, "embeddings", {"model": EMBED_MODEL, "input": "Hello"})
        found = await families(stage)
    assert value(found, "vllm:e2e_request_latency_seconds_count") == 2
    assert value(found, "vllm:time_to_first_token_seconds_bucket", le="+Inf") == 2
    assert value(found, "vllm:generation_tokens_total") == 2 * len(WORDS)
    assert value(found, "vllm:prompt_tokens_total") == value(found, "vllm:request_prompt_tokens_sum") > 0
    assert found["vllm:generation_tokens"].type == "counter"
    # Everything served is described, and everything described is served.
    served = {name for name in found if name.startswith("vllm:")}
    assert served == {name.removesuffix("_total") for name in DESCRIPTIONS}
    for family in (found[name] for name in served):
        assert {tuple(sorted(one.labels.items() & LABELS.items())) for one in family.samples} == {
            tuple(sorted(LABELS.items()))
        }


async def test_gauges_of_a_dead_engine_are_absent_under_these_names_too():
    async with staged(**ON) as stage:
        stage.generator.on_start = asyncio.Event().wait
        stage.generator.die()
        found = await families(stage)
        assert await families(stage) == found, "a page is kept for a moment"
    assert found["vllm:num_requests_waiting"].samples == []
    assert found["vllm:kv_cache_usage_perc"].samples == []


def test_waiting_is_gate_and_engine_and_usage_is_a_share_of_the_quota():
    metrics = Metrics()
    readings = {
        metrics.waiting: {"llm": 3.0, "embedding": 50.0},
        metrics.engine_waiting: {"llm": 4.0},
        metrics.used_bytes: {"llm": 5_120.0},
        metrics.quota_bytes: {"llm": 20_480.0, "embedding": 1.0},
    }
    text = metrics.exposition(readings, ("m", GEOMETRY)).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert value(found, "vllm:num_requests_waiting", model_name="m") == 7
    assert value(found, "vllm:kv_cache_usage_perc") == value(found, "vllm:gpu_cache_usage_perc") == 0.25
    # 8 elements of 2 bytes in blocks of 16 tokens: 256 bytes a block.
    assert value(found, "vllm:cache_config_info", block_size="16", num_gpu_blocks="80") == 1


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)
def test_sources_are_series_of_ours(series):
    families = {one.name.removesuffix("_total"): one.kind for one in Metrics().described}
    for source in (*series.sources, *filter(None, [series.divisor])):
        name = source.removesuffix("_total").removesuffix("_sum")
        assert name in families
        if series.kind == "histogram":
            assert families[name] == "histogram"


def test_a_family_without_samples_stays_empty():
    assert all(
        family.samples == [] or family.name == "vllm:cache_config_info"
        for family in vllm_families([], "m", GEOMETRY)
    )
