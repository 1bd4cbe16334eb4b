"""`ray start` and `serve deploy`, as in docs/fleet.md: a changed configuration reaches boxes under load.

One node; the boxes are real, their engines simulated.
"""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import pytest
import yaml

from benchmark_control_plane.common.servers import free_port
from benchmark_control_plane.experiments.fleet.simulated_boxes import BEGUN, box_config
from benchmark_control_plane.experiments.fleet.streaming_client import Ending, client, exchange
from controlplane.fleet_on_ray.kind_names import PAGE_APPLICATION, PAGE_PATH
from controlplane.fleet_on_ray.local_cluster import BINARY, SETTINGS
from tests.controlplane.fleet_on_ray.ray_marks import RUNS_A_FLEET
from tests.controlplane.fleet_on_ray.test_faults import ADMIN, BOX, endings, load, replicas, until

pytestmark = [*RUNS_A_FLEET, pytest.mark.slow]

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = Path(sys.executable).parent
CLASS, MEMORY = "interactive", 300 * 2**20


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster of one node, with the environment that docs/fleet.md states."""

    folder: Path
    environment: Mapping[str, str]
    port: int
    dashboard: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [PROGRAMS / program, *arguments], env=dict(self.environment), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def deploy(self, config: Path, user_config: Mapping[str, Any]) -> None:
        """Deploys two boxes of one kind, and the page."""
        kinds = {"box": {"config": str(config), "boxes": 2, "gpus": 0, "cpus": 0.1}}
        arguments = {"kinds": kinds, "routers": 2}
        boxes = {"name": "Box", "num_replicas": 2, "user_config": dict(user_config)}
        path = "controlplane.fleet_on_ray.application"
        applications = [
            {"name": "tandem-box", "route_prefix": "/", "import_path": f"{path}:fleet", "args": arguments,
             "deployments": [boxes]},
            {"name": PAGE_APPLICATION, "route_prefix": PAGE_PATH, "import_path": f"{path}:page",
             "args": arguments},
        ]  # fmt: skip
        file = self.folder / "my-serve.yaml"
        file.write_text(
            yaml.safe_dump({"http_options": {"port": self.port}, "applications": applications}),
            encoding="utf-8",
        )
        self.run("serve", "deploy", str(file), "--address", f"http://127.0.0.1:{self.dashboard}")

    async def boxes(self, http: httpx.AsyncClient) -> list[dict[str, Any]]:
        """Those that answer, as the page has them; none before it is there."""
        try:
            answer = await http.get(f"{self.url}{PAGE_PATH}/boxes", headers=ADMIN)
        except httpx.TransportError:
            return []
        return [box for box in answer.json()["boxes"] if box["report"]] if answer.is_success else []


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    python_path = os.pathsep.join([str(tmp_path / "plugin"), str(ROOT), str(ROOT / "kernels")])
    environment = {
        **os.environ, **SETTINGS, BINARY: str(PROGRAMS / "tandem-haproxy"),
        "TANDEM_ROUTER_KEY": "routers", "RAY_AUTH_TOKEN": token_hex(32),
        "PYTHONPATH": python_path, "TANDEM_SIMULATED_BEGUN": str(tmp_path / BEGUN),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()), "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }  # fmt: skip
    found = Cluster(tmp_path, environment, free_port(), free_port())
    found.run(
        "ray", "start", "--head", "--port", str(free_port()), "--dashboard-port", str(found.dashboard),
        "--object-store-memory", str(100 * 2**20), "--num-cpus", "2", "--disable-usage-stats",
    )  # fmt: skip
    try:
        yield found
    finally:
        found.run("ray", "stop", "--force")


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
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    first = written(cluster.folder, "box-1.yaml", 256 * 2**20)
    await asyncio.to_thread(cluster.deploy, first, {})

    async def two_answer() -> bool:
        return len(await cluster.boxes(http)) == 2

    async def completes() -> bool:
        found = await exchange(http, cluster.url, tokens=2)
        return found.ending is Ending.COMPLETE

    await until(two_answer, 120)
    await until(completes, 30)
    urls, processes = [box["url"] for box in await cluster.boxes(http)], set(replicas(BOX))

    async def configured(section: str, *path: str) -> list[Any]:
        """The value that each box has for a key."""
        found = []
        for box in await cluster.boxes(http):
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

    async with load(cluster.url) as ended:
        await asyncio.to_thread(cluster.deploy, first, {"classes": {CLASS: {"weight": 5}}})
        in_place = await until(both_have_the_weight, 60)
    log.info("in place after %.1f s: %s", in_place, dict(endings(ended)))
    assert set(replicas(BOX)) == processes and [box["url"] for box in await cluster.boxes(http)] == urls
    assert {ending for ending, _ in endings(ended)} <= {"complete", "refused"}

    second = written(cluster.folder, "box-2.yaml", MEMORY)
    async with load(cluster.url) as ended:
        await asyncio.to_thread(cluster.deploy, second, {"classes": {CLASS: {"weight": 5}}})
        replaced = await until(both_have_the_memory, 120)
    log.info("replaced after %.1f s: %s", replaced, dict(endings(ended)))
    assert not set(replicas(BOX)) & processes
    assert await both_have_the_weight()
    assert {ending for ending, _ in endings(ended)} <= {"complete", "refused"}
