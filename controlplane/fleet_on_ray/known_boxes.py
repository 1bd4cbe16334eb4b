"""The boxes of all kinds that a router process knows, with their loads, and the choice of one."""

import asyncio
import random
import time
from functools import cache

from ray.serve.request_router import RunningReplica

from controlplane.fleet.router import Router
from controlplane.fleet_on_ray.load_polls import LoadPolls
from controlplane.fleet_on_ray.route_query import owner_of, routed_request


class KnownBoxes:
    """Membership as Ray Serve states it, kind by kind, and the routing library over all of them."""

    def __init__(self, router_key: str) -> None:
        self._fleet = Router()
        self.polls = LoadPolls(self._fleet, router_key)
        self._kinds: dict[str, tuple[list[RunningReplica], float]] = {}
        self._replicas: dict[str, RunningReplica] = {}

    def set_replicas(self, path: str, replicas: list[RunningReplica], weight: float) -> None:
        """States all running boxes of the kind whose application has this path, and their relative speed."""
        self._kinds[path.rstrip("/")] = replicas, weight
        self._replicas, urls, weights = {}, {}, {}
        for prefix, (own, speed) in self._kinds.items():
            for replica in own:
                name = replica.replica_id.unique_id
                self._replicas[name], weights[name] = replica, speed
                if (place := replica.backend_http_endpoint) is not None:
                    urls[name] = f"http://{place[0]}:{place[1]}{prefix}"
        self.polls.set_boxes(urls, weights)

    async def choose(self, query: str, patience: float) -> RunningReplica | None:
        """The box for a request; None if no box answers for `patience` seconds, or none that may serve it."""
        name = self._choose(query) if await self.any_answers(patience) else None
        return None if name is None else self._replicas[name]

    async def any_answers(self, patience: float) -> bool:
        """Whether a box answers, now or within `patience` seconds."""
        try:
            async with asyncio.timeout(patience):
                while not self.polls.living:
                    await self.polls.joined()
        except TimeoutError:
            return False
        return True

    def _choose(self, query: str) -> str | None:
        """The name of a box that answers; None if only a kind that is silent may serve the request."""
        living, now, owner = self.polls.living, time.monotonic(), owner_of(query)
        request = routed_request(query, self._fleet.scarcest_model(owner))
        choice = self._fleet.choose(request, now, (random.random(), random.random()))
        if choice is not None and choice.box in living:
            self._fleet.sent(request, choice, now)
            return choice.box
        # A box that has such models states why none is served, with a Retry-After if that will change.
        reports = {name: self._fleet.report(name) for name in living}
        able = [name for name, report in reports.items() if report is not None and owner in report.owners]
        if not able and any(map(self._is_silent, self._kinds)):
            # A box of another kind would state that the model does not exist.
            return None
        return random.choice(able or list(living))

    def _is_silent(self, prefix: str) -> bool:
        """Whether no box of a kind answers."""
        own, _ = self._kinds[prefix]
        return self.polls.living.isdisjoint(replica.replica_id.unique_id for replica in own)


@cache
def known_boxes(router_key: str) -> KnownBoxes:
    """What the routers of all kinds in this process share: Ray Serve makes one router for each kind."""
    return KnownBoxes(router_key)
