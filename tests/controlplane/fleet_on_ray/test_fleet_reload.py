"""SIGHUP of `tandem fleet serve`: boxes take a change in place, or are replaced, under load."""

import logging
import os
import signal
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmark_control_plane.common.servers import Server
from benchmark_control_plane.experiments.fleet.simulated_boxes import CLASS, serving_fleet
from benchmark_control_plane.experiments.fleet.streaming_client import client
from tests.controlplane.fleet_on_ray.ray_marks import RUNS_A_FLEET
from tests.controlplane.fleet_on_ray.test_faults import (
    ADMIN,
    BOX,
    ROUTER,
    both_serve,
    box_urls,
    endings,
    load,
    replicas,
    until,
)

pytestmark = [*RUNS_A_FLEET, pytest.mark.slow]

log = logging.getLogger(__name__)
SECTIONS = {"server": {"admin_key_sha256": sha256(b"root").hexdigest(), "drain_ms": 10_000}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reload")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Server]:
    with serving_fleet(folder, 2, routers=1, sections=SECTIONS) as found:
        yield found


def reload(fleet: Server, folder: Path, change: dict[str, Any]) -> None:
    """Writes the changed sections into the file of the boxes, and tells the fleet."""
    file = folder / "box.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    file.write_text(yaml.safe_dump({**content, **change}), encoding="utf-8")
    os.kill(fleet.process_id, signal.SIGHUP)


async def values(section: str, *path: str) -> list[Any]:
    """The value that each box has for a key."""
    found = []
    async with client(5.0) as http:
        for url in box_urls():
            try:
                answer = await http.get(f"{url}/admin/config", headers=ADMIN)
            except httpx.TransportError:
                # It is being replaced.
                continue
            value = answer.json()["config"][section]
            for key in path:
                value = value[key]
            found.append(value)
    return found


async def test_a_class_changes_in_place(fleet: Server, folder: Path) -> None:
    await until(both_serve, 60)
    before = {*replicas(BOX), *replicas(ROUTER)}

    async def is_taken() -> bool:
        return await values("classes", CLASS, "weight") == [5, 5]

    async with load(fleet.url) as ended:
        classes = yaml.safe_load((folder / "box.yaml").read_text(encoding="utf-8"))["classes"]
        reload(fleet, folder, {"classes": {CLASS: {**classes[CLASS], "weight": 5}}})
        seconds = await until(is_taken, 60)
    log.info("in place after %.1f s: %s", seconds, dict(endings(ended)))
    assert {*replicas(BOX), *replicas(ROUTER)} == before
    assert {ending for ending, _ in endings(ended)} <= {"complete", "refused"}


async def test_memory_is_taken_by_new_boxes_one_after_the_other(fleet: Server, folder: Path) -> None:
    await until(both_serve, 60)
    before, memory = set(replicas(BOX)), 300 * 2**20

    async def is_taken() -> bool:
        return await values("pool", "memory") == [memory, memory]

    async with load(fleet.url) as ended:
        reload(fleet, folder, {"pool": {"memory": memory}})
        seconds = await until(is_taken, 120)
    log.info("replaced after %.1f s: %s", seconds, dict(endings(ended)))
    assert not set(replicas(BOX)) & before
    assert await values("classes", CLASS, "weight") == [5, 5]
    assert {ending for ending, _ in endings(ended)} <= {"complete", "refused"}


async def test_what_is_not_valid_changes_nothing(fleet: Server, folder: Path) -> None:
    await until(both_serve, 60)
    before = set(replicas(BOX))
    reload(fleet, folder, {"pool": {"memory": -1}})

    async def is_stated() -> bool:
        text = (folder / "fleet.log").read_text(encoding="utf-8")
        return "pool.memory" in text and "nothing was changed" in text

    await until(is_stated, 20)
    assert set(replicas(BOX)) == before
