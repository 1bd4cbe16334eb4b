"""`ray start` and `serve deploy`, as in docs/fleet.md: a changed configuration reaches boxes under load.

One node; the boxes are real, their engines simulated.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmark_control_plane.common.servers import free_port
from benchmark_control_plane.experiments.fleet.ray_cluster import (
    RayCluster,
    cluster_environment,
    listed_boxes,
)
from benchmark_control_plane.experiments.fleet.simulated_boxes import box_config
from benchmark_control_plane.experiments.fleet.streaming_client import Ending, client, exchange
from tests.controlplane.fleet_on_ray.ray_marks import RUNS_A_FLEET
from tests.controlplane.fleet_on_ray.test_faults import ADMIN, BOX, endings, load, replicas, until

pytestmark = [*RUNS_A_FLEET, pytest.mark.slow]

log = logging.getLogger(__name__)
CLASS, MEMORY = "interactive", 300 * 2**20


@dataclass(frozen=True)
class OneNode:
    """A Ray cluster of one node, with the environment that docs/fleet.md states."""

    cluster: RayCluster
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def deploy(self, config: Path, user_config: Mapping[str, Any]) -> None:
        """Deploys two boxes of one kind, and the page."""
        boxes = {"name": "Box", "num_replicas": 2, "user_config": dict(user_config)}
        self.cluster.deploy(config, self.port, boxes=2, routers=2, overrides=[boxes])

    async def boxes(self, http: httpx.AsyncClient) -> list[dict[str, Any]]:
        """Those that answer, as the page has them; none before it is there."""
        return [box for box in await listed_boxes(http, self.url, ADMIN) or [] if box["report"]]


@pytest.fixture
def one_node(tmp_path: Path) -> Iterator[OneNode]:
    dashboard = free_port()
    environment = {
        **cluster_environment(tmp_path),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }
    cluster = RayCluster(tmp_path, environment, f"http://127.0.0.1:{dashboard}")
    cluster.start("--head", "--port", str(free_port()), "--dashboard-port", str(dashboard))
    try:
        yield OneNode(cluster, free_port())
    finally:
        cluster.run("ray", "stop", "--force")


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with client(20.0) as one:
        yield one


def written(folder: Path, name: str, memory: int) -> Path:
    """A configuration of a box."""
    server = {"admin_key_sha256": sha256(b"root").hexdigest(), "drain_ms": 10_000}
    config = {**box_config(folder, {"server": server}), "pool": {"memory": memory}}
    (folder / name).write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder / name


async def test_user_config_changes_boxes_in_place_and_another_file_replaces_them(
    one_node: OneNode, http: httpx.AsyncClient
) -> None:
    folder = one_node.cluster.folder
    first = written(folder, "box-1.yaml", 256 * 2**20)
    await asyncio.to_thread(one_node.deploy, first, {})

    async def two_answer() -> bool:
        return len(await one_node.boxes(http)) == 2

    async def completes() -> bool:
        found = await exchange(http, one_node.url, tokens=2)
        return found.ending is Ending.COMPLETE

    await until(two_answer, 120)
    await until(completes, 30)
    urls, processes = [box["url"] for box in await one_node.boxes(http)], set(replicas(BOX))

    async def configured(section: str, *path: str) -> list[Any]:
        """The value that each box has for a key."""
        found = []
        for box in await one_node.boxes(http):
            try:
                answer = await http.get(f"{box['url']}/admin/config", headers=ADMIN)
            except httpx.TransportError:
                # It is being replaced.
                continue
            value = answer.json()["config"][section]
            for key in path:
                value = value[key]
            found.append(value)
        return found

    async def both_have_the_weight() -> bool:
        return await configured("classes", CLASS, "weight") == [5, 5]

    async def both_have_the_memory() -> bool:
        return await configured("pool", "memory") == [MEMORY, MEMORY]

    async with load(one_node.url) as ended:
        await asyncio.to_thread(one_node.deploy, first, {"classes": {CLASS: {"weight": 5}}})
        in_place = await until(both_have_the_weight, 60)
    log.info("in place after %.1f s: %s", in_place, dict(endings(ended)))
    assert set(replicas(BOX)) == processes and [box["url"] for box in await one_node.boxes(http)] == urls
    assert {ending for ending, _ in endings(ended)} <= {"complete", "refused"}

    second = written(folder, "box-2.yaml", MEMORY)
    async with load(one_node.url) as ended:
        await asyncio.to_thread(one_node.deploy, second, {"classes": {CLASS: {"weight": 5}}})
        replaced = await until(both_have_the_memory, 120)
    log.info("replaced after %.1f s: %s", replaced, dict(endings(ended)))
    assert not set(replicas(BOX)) & processes
    assert await both_have_the_weight()
    assert {ending for ending, _ in endings(ended)} <= {"complete", "refused"}
