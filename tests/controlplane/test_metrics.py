"""Prometheus finds what its conventions promise: totals are counters, what is not said is absent."""

from prometheus_client.parser import text_string_to_metric_families

from benchmark_control_plane.judge.memory import TOTALS
from controlplane.core.ports import Refused
from controlplane.metrics import Metrics
from tests.controlplane.api.stage import Stage, staged

QUOTA = {"policy": "dynamic", "llm": {"nominal": 0.7, "min": 0.3}, "embedding": {"nominal": 0.3}}
ORDERS = {"scheduling": {"engine": {}}, "quota": QUOTA | {"tick_ms": 10_000}}
GROWING = {
    "tandem_device_alerts",
    "tandem_device_failures",
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


async def test_what_only_grows_is_a_counter():
    async with staged(**ORDERS) as stage:
        stage.service.quotas.trouble.met(Refused("no such quota"))
        stage.service.quotas.moves = 3
        text = await page(stage)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {families[name].type for name in GROWING} == {"counter"}
    assert 'tandem_quota_failures_total{fault="refused"} 1.0' in text
    assert "tandem_quota_moves_total 3.0" in text
    assert 'tandem_reclaimed_bytes_total{owner="llm"} 0.0' in text
    for family in families.values():
        is_total = any(sample.name.endswith("_total") for sample in family.samples)
        assert not is_total or family.type == "counter", family.name
        assert family.name.startswith("tandem_") and family.documentation
        assert not family.name.endswith(("_ms", "_milliseconds", "_kib", "_mib"))


async def test_what_a_dead_engine_said_last_is_not_said_again():
    async with staged() as stage:
        assert 'tandem_engine_used_bytes{owner="llm"} 0.0' in await page(stage)
        stage.generator.die()
        assert "tandem_engine_used_bytes{" not in await page(stage)


def test_the_judge_reads_totals_that_are_there():
    told = Metrics().exposition({}).decode()
    read = {name.decode() for name in TOTALS if name.startswith(b"tandem_")}
    assert read and {name for name in read if f"# TYPE {name} counter" in told} == read
