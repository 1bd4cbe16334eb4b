"""`ray start` and `serve deploy`, as docs/fleet.md states them for several machines, with simulated boxes."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import yaml

from benchmark_control_plane.experiments.fleet.network_nodes import Network, NetworkNode, network
from benchmark_control_plane.experiments.fleet.simulated_boxes import box_config, box_variables
from controlplane.fleet_on_ray.kind_names import BOX, PAGE_APPLICATION, PAGE_PATH, ROUTER
from controlplane.fleet_on_ray.local_cluster import BINARY, SETTINGS

_PROGRAMS = Path(sys.executable).parent
_GCS_PORT, _DASHBOARD_PORT, _HTTP_PORT = 6379, 8265, 8000
_OBJECT_STORE_BYTES = 100 * 2**20


@dataclass(frozen=True)
class RayCluster:
    """A cluster, by the environment of all its nodes and the URL of the head's dashboard."""

    folder: Path
    environment: Mapping[str, str]
    dashboard: str

    def run(self, program: str, *arguments: str, node: NetworkNode | None = None) -> None:
        """Runs a program of Ray to its end, here or on a node. Raises RuntimeError with what it wrote."""
        words = [str(_PROGRAMS / program), *arguments]
        done = subprocess.run(
            words if node is None else node.command(*words), env=dict(self.environment), capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(arguments)}: {done.stdout}{done.stderr}")

    def start(self, *arguments: str, node: NetworkNode | None = None) -> None:
        """Starts a node for two cores and a small object store."""
        size = str(_OBJECT_STORE_BYTES)
        self.run(
            "ray", "start", *arguments, "--object-store-memory", size, "--num-cpus", "2",
            "--disable-usage-stats", node=node,
        )  # fmt: skip

    def deploy(
        self,
        config: Path,
        port: int,
        *,
        boxes: int,
        routers: int,
        overrides: Sequence[Mapping[str, Any]],
    ) -> None:
        """Deploys one kind of box with that configuration, and the page; does not wait for them.

        `overrides` change deployments of the boxes' application.
        """
        kinds = {"box": {"config": str(config), "boxes": boxes, "gpus": 0, "cpus": 0.1}}
        arguments = {"kinds": kinds, "routers": routers}
        path = "controlplane.fleet_on_ray.application"
        applications = [
            {"name": "tandem-box", "route_prefix": "/", "import_path": f"{path}:fleet", "args": arguments,
             "deployments": [dict(each) for each in overrides]},
            {"name": PAGE_APPLICATION, "route_prefix": PAGE_PATH, "import_path": f"{path}:page",
             "args": arguments},
        ]  # fmt: skip
        file = self.folder / "my-serve.yaml"
        content = {"http_options": {"port": port}, "applications": applications}
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        self.run("serve", "deploy", str(file), "--address", self.dashboard)


def cluster_environment(folder: Path) -> dict[str, str]:
    """The environment of every node, with a new token and the plug-in of the boxes in `folder`."""
    return {
        **os.environ,
        **SETTINGS,
        BINARY: str(_PROGRAMS / "tandem-haproxy"),
        "TANDEM_ROUTER_KEY": "routers",
        "RAY_AUTH_TOKEN": token_hex(32),
        **box_variables(folder),
    }


async def listed_boxes(
    http: httpx.AsyncClient, url: str, headers: Mapping[str, str]
) -> list[dict[str, Any]] | None:
    """All boxes as the page has them; None while it does not answer."""
    try:
        answer = await http.get(f"{url}{PAGE_PATH}/boxes", headers=dict(headers))
    except httpx.TransportError:
        return None
    return list(answer.json()["boxes"]) if answer.is_success else None


@dataclass(frozen=True)
class NodeFleet:
    """A fleet with one box and one router on each of several nodes; the first node is the head."""

    network: Network
    cluster: RayCluster

    def url(self, node: int = 0) -> str:
        """The address of the HAProxy of a node."""
        return f"http://{self.network.nodes[node].address}:{_HTTP_PORT}"

    def join(self, node: NetworkNode) -> None:
        """Starts Ray on a node, as a part of the cluster."""
        head = f"{self.network.nodes[0].address}:{_GCS_PORT}"
        self.cluster.start("--address", head, "--node-ip-address", node.address, node=node)


@contextmanager
def deployed_on_nodes(folder: Path, count: int, sections: Mapping[str, Any]) -> Iterator[NodeFleet]:
    """Runs a Ray cluster of so many nodes with a fleet, whose boxes may not serve yet."""
    config = folder / "box.yaml"
    config.write_text(yaml.safe_dump(box_config(folder, sections)), encoding="utf-8")
    with network(count) as made:
        head = made.nodes[0]
        dashboard = f"http://{head.address}:{_DASHBOARD_PORT}"
        cluster = RayCluster(folder, cluster_environment(folder), dashboard)
        cluster.start(
            "--head", "--port", str(_GCS_PORT), "--node-ip-address", head.address,
            "--dashboard-host", "0.0.0.0", "--dashboard-port", str(_DASHBOARD_PORT), node=head,
        )  # fmt: skip
        fleet = NodeFleet(made, cluster)
        for node in made.nodes[1:]:
            fleet.join(node)
        # Ray may place two on a node otherwise.
        overrides = [
            {"name": BOX, "num_replicas": count, "max_replicas_per_node": 1},
            {"name": ROUTER, "num_replicas": count, "max_replicas_per_node": 1},
        ]
        cluster.deploy(config, _HTTP_PORT, boxes=count, routers=count, overrides=overrides)
        yield fleet
