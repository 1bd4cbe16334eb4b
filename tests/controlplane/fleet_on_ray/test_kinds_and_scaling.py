"""A fleet on Ray Serve with two kinds of boxes, of which one is scaled; the engines are simulated.

One fleet for the whole file: its start takes half a minute.
"""

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import httpx
import pytest

from benchmark_control_plane.experiments.fleet.simulated_boxes import (
    EMBEDDING_MODEL,
    embedding_box_config,
    serving_fleet,
)
from benchmark_control_plane.experiments.fleet.streaming_client import Ending, client, exchange
from tests.controlplane.fleet_on_ray.ray_marks import RUNS_A_FLEET
from tests.controlplane.fleet_on_ray.test_faults import endings, load, replicas, until

pytestmark = RUNS_A_FLEET

log = logging.getLogger(__name__)
SECTIONS = {"server": {"admin_key_sha256": sha256(b"root").hexdigest(), "drain_ms": 10_000}}
CHAT_BOX, SEARCH_BOX = "ray::ServeReplica:tandem-box:Box", "ray::ServeReplica:tandem-search:Box"
MOST, START_S, LOWER_AFTER_S = 3, 5, 6
BODY = {"model": EMBEDDING_MODEL, "input": ["some text", "more text"]}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("kinds")
    scale = {"max_boxes": MOST, "start_s": START_S, "lower_after_s": LOWER_AFTER_S}
    search = embedding_box_config(folder, SECTIONS)
    with serving_fleet(
        folder, 1, routers=1, sections=SECTIONS, autoscale=scale, more_kinds={"search": search}
    ) as fleet:
        yield fleet.url


async def embedded(http: httpx.AsyncClient, url: str) -> int:
    return (await http.post(f"{url}/v1/embeddings", json=BODY)).status_code


async def test_each_request_goes_to_a_kind_that_serves_it(url: str) -> None:
    assert (len(replicas(CHAT_BOX)), len(replicas(SEARCH_BOX))) == (1, 2)
    async with client() as http:
        await until(lambda: is_embedded(http, url), 20)
        chats = [await exchange(http, url, tokens=2) for _ in range(20)]
        vectors = [await embedded(http, url) for _ in range(20)]
    assert endings(chats) == {("complete", 200): 20}
    assert Counter(vectors) == {200: 20}


async def test_the_page_knows_the_boxes_of_all_kinds_and_their_own_ports(url: str) -> None:
    async with client() as http:
        page = await http.get(f"{url}/fleet/")
        assert "<title>Tandem fleet</title>" in page.text

        async def boxes() -> list[dict[str, Any]]:
            answer = await http.get(f"{url}/fleet/boxes", headers={"authorization": "Bearer root"})
            found: list[dict[str, Any]] = answer.json()["boxes"]
            return found

        async def all_answer() -> bool:
            return all(box["report"] for box in await boxes())

        await until(all_answer, 20)
        found = await boxes()
        assert Counter(box["kind"] for box in found) == {"box": 1, "search": 2}
        assert all(EMBEDDING_MODEL in box["report"]["models"] for box in found if box["kind"] == "search")
        targets = (await http.get(f"{url}/fleet/targets")).json()
        assert len(targets) == 3
        for target in targets:
            (address,), path = target["targets"], target["labels"]["__metrics_path__"]
            assert "tandem_quota_bytes" in (await http.get(f"http://{address}{path}")).text


async def is_embedded(http: httpx.AsyncClient, url: str) -> bool:
    return await embedded(http, url) == 200


async def number_of_boxes(expected: int) -> bool:
    return len(replicas(CHAT_BOX)) == expected


@pytest.mark.slow
async def test_boxes_are_added_under_load_and_drained_after_it(url: str) -> None:
    await until(lambda: number_of_boxes(1), 60)
    async with load(url, clients=2) as light:
        async with load(url, clients=24) as heavy:
            up = await until(lambda: number_of_boxes(MOST), 60)
            # The last one has loaded its engine when it answers, too.
            await asyncio.sleep(START_S)
        down = await until(lambda: number_of_boxes(1), 90)
    log.info("3 boxes after %.1f s, 1 box %.1f s after the load", up, down)
    log.info("under load %s, light load %s", dict(endings(heavy)), dict(endings(light)))
    assert down >= LOWER_AFTER_S
    for exchanges in (heavy, light):
        assert {each.ending for each in exchanges} <= {Ending.COMPLETE, Ending.REFUSED}
        refused = [each for each in exchanges if each.ending is Ending.REFUSED]
        assert all(each.status in (429, 503) and each.retry_after is not None for each in refused)


async def test_embeddings_are_served_while_the_other_kind_has_no_box(url: str) -> None:
    await until(lambda: number_of_boxes(1), 60)
    async with client() as http:
        await until(lambda: is_embedded(http, url), 20)
        os.kill(replicas(CHAT_BOX)[0], signal.SIGKILL)
        seen = Counter([await embedded(http, url) for _ in range(40)])
        refused = await exchange(http, url, tokens=1)
        await until(lambda: is_complete(http, url), 60)
    log.info("embeddings without a chat box: %s", dict(seen))
    assert set(seen) <= {200, 503} and seen[200] >= 30
    assert (refused.status, refused.retry_after) == (503, "2")


async def is_complete(http: httpx.AsyncClient, url: str) -> bool:
    return (await exchange(http, url, tokens=1)).ending is Ending.COMPLETE
