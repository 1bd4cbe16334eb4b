"""A real Prometheus scrapes a server, records the rules, and answers the queries of the dashboard."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from benchmark_control_plane.common.servers import free_port
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, listening, staged
from tests.programs import required

OPS = Path(__file__).resolve().parents[2] / "ops"
CLASSES = {"quick": {"ttft_ms": 5_000, "default": True}, "slow": {"e2e_ms": 0.001, "sheddable": False}}
# Series that a server with scripted engines and static quotas does not have.
ABSENT = (
    "tandem_device_alerts_total", "tandem_device_bytes", "tandem_embedding_forecast_coverage",
    "tandem_engine_recompute_tokens_total", "tandem_quota_failures_total", "tandem_quota_moves_total",
    "tandem_reclaimed_bytes_total", "tandem_urgency",
)  # fmt: skip

pytestmark = pytest.mark.long


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[httpx.AsyncClient]:
    """A Prometheus with the rules of ops/ that scrapes the target five times a second."""
    program = required("prometheus")
    config = {
        "global": {"scrape_interval": "200ms", "evaluation_interval": "200ms"},
        "rule_files": [str(OPS / "prometheus/rules.yml")],
        "scrape_configs": [{"job_name": "tandem", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}", "--log.level=error",
    )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}/api/v1", timeout=10) as http:
            yield http
    finally:
        process.terminate()
        await process.wait()


async def answered(http: httpx.AsyncClient, expression: str) -> list[dict[str, object]]:
    """The samples of a query; none while Prometheus starts."""
    try:
        answer = await http.get("/query", params={"query": expression})
    except httpx.ConnectError:
        return []
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return []
    found = answer.json()
    assert found["status"] == "success", (expression, found)
    samples: list[dict[str, object]] = found["data"]["result"]
    return samples


async def test_rules_record_the_burn_and_every_panel_has_data(tmp_path: Path) -> None:
    panels = json.loads((OPS / "grafana/tandem.json").read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    async with (
        staged(classes=CLASSES) as stage,
        listening(stage.app) as url,
        prometheus(tmp_path, url.removeprefix("http://")) as http,
        asyncio.timeout(60),
    ):
        rates: dict[str, str] = {}
        while not CLASSES.keys() <= rates.keys():
            for name in CLASSES:
                sent = {"model": CHAT_MODEL, "prompt": "Hello", "service_class": name}
                assert (await stage.http.post("/v1/completions", json=sent)).status_code == 200
            body = {"model": EMBED_MODEL, "input": "Hello"}
            assert (await stage.http.post("/v1/embeddings", json=body)).status_code == 200
            # Prometheus scrapes in a process of its own, which signals nothing here.
            await asyncio.sleep(0.1)
            burn = await answered(http, "round(class:tandem_burn_rate:rate5m, 0.01)")
            rates = {sample["metric"]["class"]: sample["value"][1] for sample in burn}  # type: ignore[index]
        assert rates == {"quick": "0", "slow": "10", "unread": "0"}
        empty = []
        for query in queries:
            stated = query.replace("$instance", ".*").replace("$class", ".*")
            if not await answered(http, stated) and not any(name in query for name in ABSENT):
                empty.append(query)
        assert empty == []
