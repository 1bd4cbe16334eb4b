"""A fleet on three Ray nodes in network namespaces: nodes cut off and lost, a bad link, a box that hangs.

The boxes and the nodes are real, the engines simulated, and the cables those of a switch in user space. One
fleet for the whole file, which ends with the loss of a node.
"""

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmark_control_plane.experiments.fleet.network_nodes import NetworkNode, can_make_networks
from benchmark_control_plane.experiments.fleet.ray_cluster import NodeFleet, deployed_on_nodes, listed_boxes
from benchmark_control_plane.experiments.fleet.simulated_boxes import BEGUN
from benchmark_control_plane.experiments.fleet.streaming_client import (
    Ending,
    StreamedExchange,
    client,
    exchange,
)
from tests.controlplane.fleet_on_ray.ray_marks import RUNS_A_FLEET
from tests.controlplane.fleet_on_ray.test_faults import (
    ADMIN,
    BOX,
    CLIENTS,
    PROBES,
    ROUTER,
    SECTIONS,
    ended_by,
    endings,
    load,
    replicas,
    require_empty_ledger,
    until,
)

pytestmark = [
    *RUNS_A_FLEET,
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_networks(), reason="needs the rights to make network namespaces"),
]

log = logging.getLogger(__name__)
NODES = 3
CUT_SECONDS, BAD_SECONDS = 6.0, 12.0
PATIENCE = 60.0
"""A client that hears nothing for so long is without an answer."""
HANG_SECONDS = 25.0
"""Shorter than Ray takes to give up a node, and far beyond the 10 s after which HAProxy does."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[NodeFleet]:
    with deployed_on_nodes(folder, NODES, SECTIONS) as found:
        yield found


async def boxes_of(fleet: NodeFleet) -> dict[str, str]:
    """URLs of the boxes that give reports, by the address of their node; empty while the page is silent."""
    async with client(5.0) as http:
        listed = await listed_boxes(http, fleet.url(), ADMIN) or []
    return {httpx.URL(box["url"]).host: box["url"] for box in listed if box["report"]}


async def all_serve(fleet: NodeFleet) -> bool:
    """Whether each node has a box that is ready, and the HAProxy of each serves requests."""
    urls = await boxes_of(fleet)
    async with client(5.0) as http:
        for url in [*urls.values(), *map(fleet.url, range(NODES))]:
            try:
                if (await http.get(f"{url}/ready")).status_code != 200:
                    return False
            except httpx.TransportError:
                return False
    return len(urls) == NODES


def running_on(node: NetworkNode, title: str) -> list[int]:
    return [process for process in replicas(title) if node.has(process)]


@dataclass
class Seen:
    """What clients saw of a fault.

    Attributes:
        ended: exchanges of the clients that send all the time.
        probes: exchanges while the fault lasts, one after the other.
    """

    ended: list[StreamedExchange]
    probes: list[StreamedExchange]

    def require_answers(self) -> None:
        """No request is without an answer; at most those that a box had, and one more each, are cut."""
        found = endings([*self.ended, *self.probes])
        assert {ending for ending, _ in found} <= {"complete", "cut", "refused"}, found
        assert len(self.ended) - endings(self.ended)["complete", 200] <= 2 * CLIENTS
        refused = [each for each in self.ended if each.ending is Ending.REFUSED]
        # Those that a box may have begun end with a 502.
        assert all(each.status == 502 or each.retry_after is not None for each in refused)
        assert {each.status for each in refused} <= {429, 502, 503}

    def __str__(self) -> str:
        slow = sum(each.seconds > 1.5 for each in self.probes)
        every = [*self.ended, *self.probes]
        cut = [f"{each.seconds:.1f}" for each in every if each.ending is Ending.CUT]
        return (
            f"{dict(endings(self.ended))}, meanwhile {dict(endings(self.probes))} of which {slow} took more "
            f"than 1.5 s, the longest of all {max(each.seconds for each in every):.1f} s, cut after "
            f"{', '.join(cut) or 'none'}"
        )


@asynccontextmanager
async def fault(fleet: NodeFleet, through: int = 0) -> AsyncIterator[Seen]:
    """Clients of the HAProxy of a node; the block makes a fault, sends probes and ends the fault."""
    await until(lambda: all_serve(fleet), 120)
    async with load(fleet.url(through), patience=PATIENCE) as ended:
        seen = Seen(ended, [])
        yield seen


async def probe(seen: Seen, url: str, seconds: float = 0.0) -> None:
    """Sends `PROBES` requests one after the other, or as many as `seconds` allow."""
    end, least = time.monotonic() + seconds, len(seen.probes) + PROBES
    async with client(PATIENCE) as http:
        while len(seen.probes) < least or time.monotonic() < end:
            seen.probes.append(await exchange(http, url, tokens=2))


async def works_again(box: str, before: int) -> bool:
    """Whether a box has ended more requests than `before`."""
    async with client(2.0) as http:
        try:
            return await ended_by(http, box) > before
        except httpx.TransportError:
            return False


async def work_of(box: str) -> int:
    async with client() as http:
        return await ended_by(http, box)


async def test_each_node_has_a_box_and_a_router(fleet: NodeFleet) -> None:
    begin = await until(lambda: all_serve(fleet), 180)
    log.info("three nodes serve %.0f s after the deployment", begin)

    async def have_one_each() -> bool:
        placed = [len(running_on(node, title)) for title in (BOX, ROUTER) for node in fleet.network.nodes]
        return placed == [1] * (2 * NODES)

    # Ray starts the last router after all boxes serve.
    assert await until(have_one_each, 60) < 60


@pytest.mark.parametrize(("cut", "through"), [(2, 0), (0, 1)], ids=["other", "head"])
async def test_a_node_that_is_cut_off_for_a_while_loses_no_answer(
    fleet: NodeFleet, cut: int, through: int
) -> None:
    node = fleet.network.nodes[cut]
    async with fault(fleet, through) as seen:
        box = (await boxes_of(fleet))[node.address]
        fleet.network.set_cable(node, loss=1.0)
        try:
            await probe(seen, fleet.url(through), CUT_SECONDS)
        finally:
            fleet.network.set_cable(node)
        before = await work_of(box)
        recovery = await until(lambda: works_again(box, before), 60)
    log.info("node %d cut off: %s; its box works %.1f s after it", cut, seen, recovery)
    seen.require_answers()


async def test_a_delayed_and_lossy_link_loses_no_request(fleet: NodeFleet) -> None:
    node = fleet.network.nodes[2]
    async with fault(fleet) as seen:
        box = (await boxes_of(fleet))[node.address]
        before = await work_of(box)
        fleet.network.set_cable(node, delay=0.05, loss=0.01)
        try:
            await probe(seen, fleet.url(), BAD_SECONDS)
            served = await work_of(box) - before
        finally:
            fleet.network.set_cable(node)
    log.info("bad link: %s; %d requests on that node", seen, served)
    seen.require_answers()
    assert {each.ending for each in [*seen.ended, *seen.probes]} == {Ending.COMPLETE}
    assert served > 0


async def test_a_box_that_hangs_on_another_node_loses_nothing(fleet: NodeFleet) -> None:
    async with fault(fleet) as seen:
        (stopped,) = running_on(fleet.network.nodes[1], BOX)
        os.kill(stopped, signal.SIGSTOP)
        try:
            await asyncio.sleep(1.5)
            await probe(seen, fleet.url())
        finally:
            os.kill(stopped, signal.SIGCONT)
    log.info("hung box: %s", seen)
    seen.require_answers()
    assert {each.ending for each in seen.ended} <= {Ending.COMPLETE, Ending.REFUSED}


async def test_a_lost_node_loses_no_answer_and_may_come_back(fleet: NodeFleet) -> None:
    """Its cable is out until Ray has given it up; the boxes there then end, and Ray is started once more."""
    node = fleet.network.nodes[2]

    async def is_given_up() -> bool:
        async with client(5.0) as http:
            listed = await listed_boxes(http, fleet.url(), ADMIN)
        return listed is not None and node.address not in {httpx.URL(box["url"]).host for box in listed}

    async def has_no_box() -> bool:
        return not running_on(node, BOX)

    async with fault(fleet) as seen:
        fleet.network.set_cable(node, loss=1.0)
        try:
            await probe(seen, fleet.url(), CUT_SECONDS)
            given_up = CUT_SECONDS + await until(is_given_up, 180)
            await probe(seen, fleet.url())
        finally:
            fleet.network.set_cable(node)
        ended = await until(has_no_box, 120)
    log.info("node lost: %s; given up after %.0f s, its box ended %.0f s later", seen, given_up, ended)
    seen.require_answers()
    assert max(each.seconds for each in seen.ended) < HANG_SECONDS
    await asyncio.to_thread(node.kill)
    await asyncio.to_thread(fleet.join, node)
    log.info("three nodes serve %.0f s after its return", await until(lambda: all_serve(fleet), 180))


async def test_afterwards_ledgers_are_empty_and_no_request_was_begun_twice(
    fleet: NodeFleet, folder: Path
) -> None:
    await until(lambda: all_serve(fleet), 120)
    async with client() as http:
        for box in (await boxes_of(fleet)).values():
            await require_empty_ledger(http, box)
    begun = Counter((folder / BEGUN).read_text(encoding="utf-8").split())
    named = {request_id: times for request_id, times in begun.items() if "." in request_id}
    assert len(named) > 50
    assert {request_id for request_id, times in named.items() if times > 1} == set()
