"""Reads the load of every box in a fixed period, for one router.

HAProxy sends the answers of boxes to the clients, past the router, so reports cannot travel with them here.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import httpx

from controlplane.fleet.load_report import InvalidReport, LoadReport, parse_report
from controlplane.fleet.router import Router

_log = logging.getLogger("tandem.fleet")

PERIOD_S = 0.2
"""Seconds between two reports of a box; beyond a second they are useless (docs/fleet.md, staleness)."""
TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class BoxState:
    """One box: its name, its base URL, and its last report; None while it does not answer."""

    name: str
    url: str
    report: LoadReport | None


class LoadPolls:
    """Gives the router the reports of its boxes; a box that does not answer leaves it until it does.

    The membership is the caller's: `set_boxes` states it. The methods belong to one event loop.
    """

    def __init__(self, router: Router, router_key: str, *, period: float = PERIOD_S) -> None:
        """`router_key` opens `/admin/load` of the boxes; `period` is in seconds."""
        self._router = router
        self._period = period
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {router_key}"},
            timeout=TIMEOUT_S,
            # Each box has its connection: polls of boxes that hang must not delay those of others.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._urls: dict[str, str] = {}
        self._weights: dict[str, float] = {}
        self._living: set[str] = set()
        self._silent: set[str] = set()
        self._next_joins = asyncio.Event()

    @property
    def living(self) -> Set[str]:
        """The boxes that answered the last time they were asked; the set changes with their answers."""
        return self._living

    def states(self) -> Iterator[BoxState]:
        """All boxes that are asked, in the order in which they were stated."""
        for name, url in self._urls.items():
            yield BoxState(name, url, self._router.report(name) if name in self._living else None)

    async def joined(self) -> None:
        """Returns when a box answers that did not answer before."""
        await self._next_joins.wait()

    def set_boxes(self, urls: Mapping[str, str], weights: Mapping[str, float]) -> None:
        """Asks these boxes, and no others, from now on.

        `urls` has their base URLs by name, `weights` their relative speeds, 1 where none is stated.
        """
        self._urls, self._weights = dict(urls), dict(weights)
        for name in self._polls.keys() - urls.keys():
            self._polls.pop(name).cancel()
            self._silent.discard(name)
            self._left(name)
        for name in urls.keys() - self._polls.keys():
            self._polls[name] = asyncio.create_task(self._ask_forever(name, urls[name]))
        for name in self._living:
            self._add(name)

    async def stop(self) -> None:
        """Asks no box any more."""
        self.set_boxes({}, {})
        await self._http.aclose()

    async def _ask_forever(self, name: str, url: str) -> None:
        while True:
            begin = time.monotonic()
            try:
                await self._ask(name, url)
            except Exception:
                # A defect; without the next report the box would look as it did for ever.
                _log.exception("%s at %s gets no requests until it can be asked for its load", name, url)
                self._left(name)
            await asyncio.sleep(max(0.0, begin + self._period - time.monotonic()))

    async def _ask(self, name: str, url: str) -> None:
        try:
            answer = await self._http.get(f"{url}/admin/load")
            answer.raise_for_status()
            report = parse_report(answer.content)
        except (httpx.HTTPError, InvalidReport) as error:
            self._left(name)
            if name not in self._silent:
                self._silent.add(name)
                _log.warning("%s at %s gives no load report and gets no requests: %r", name, url, error)
            return
        self.heard(name, report)

    def heard(self, name: str, report: LoadReport) -> None:
        """Gives the router a report that the box has just sent."""
        self._silent.discard(name)
        if name not in self._living:
            self._living.add(name)
            self._add(name)
            self._next_joins.set()
            self._next_joins = asyncio.Event()
        self._router.heard(name, report, time.monotonic())

    def _add(self, name: str) -> None:
        self._router.add(name, self._weights.get(name, 1.0))

    def _left(self, name: str) -> None:
        if name in self._living:
            self._living.remove(name)
            self._router.remove(name)
