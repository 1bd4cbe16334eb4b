"""Asks the routing library for a box, between HAProxy and Ray Serve.

HAProxy asks a router over HTTP (`/internal/route`) and then speaks with the chosen box itself. Membership,
health and the connection to the box are Ray Serve's. There is no second try after a 429: the answer does not
pass the router, and HAProxy 2.8 cannot repeat a request for that status.
"""

from collections.abc import Iterable, Sequence

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from controlplane.fleet_on_ray.kind_names import BOX, application_name
from controlplane.fleet_on_ray.known_boxes import known_boxes
from controlplane.fleet_on_ray.route_query import HEADER_ROUTE

_WAIT_FOR_A_BOX_S = 1.0
"""How long a request waits if no box answers; then its answer is a 503."""
_WAIT_AT_START_S = 10.0
"""How long a router that starts waits for a box that answers, before HAProxy may ask it."""


class BoxMembership(RequestRouter):  # type: ignore[misc]
    """Informs a process of the boxes of a kind, as Ray Serve informs only the request router of a handle."""

    def initialize_state(self, router_key: str, path: str, weight: float) -> None:
        """Called by Ray Serve with `request_router_kwargs`."""
        self._boxes, self._path, self._weight = known_boxes(router_key), path, weight

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve with all running replicas."""
        super().update_replicas(replicas)
        self._boxes.set_replicas(self._path, replicas, self._weight)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Any box: no request is sent to boxes through Ray Serve, and the interface needs the method."""
        return [candidate_replicas]


def follow(kinds: Iterable[str]) -> list[DeploymentHandle]:
    """Handles of the boxes of other applications, whose `BoxMembership` keeps this process informed."""
    handles = [serve.get_deployment_handle(BOX, application_name(kind)) for kind in kinds]
    for handle in handles:
        handle._init(_run_router_in_separate_loop=False)
    return handles


class BoxChooser:
    """The class of the routers' deployment: the HTTP side, which HAProxy asks."""

    async def __init__(self, router_key: str, own: DeploymentHandle, others: Sequence[str]) -> None:  # type: ignore[misc]
        """Begins to follow the boxes of the own application, and those of the `others`, which are kinds."""
        self._boxes = known_boxes(router_key)
        self._handles = [own, *follow(others)]
        # A router in a thread of its own would take two thread switches for each request.
        own._init(_run_router_in_separate_loop=False)
        await self._boxes.any_answers(_WAIT_AT_START_S)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application that Ray Serve binds to the port of the replica."""
        return Starlette(routes=[Route("/internal/route", self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        """The name of the chosen replica for HAProxy, or a 503 if no box answers."""
        found = await self._boxes.choose(request.headers.get(HEADER_ROUTE, ""), _WAIT_FOR_A_BOX_S)
        if found is None:
            return Response(status_code=503)
        return JSONResponse({"replica_id": found.replica_id.to_full_id_str()})
