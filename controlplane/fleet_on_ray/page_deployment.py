"""The page over all boxes as a replica of Ray Serve, which has an application of its own."""

from collections.abc import Mapping

from starlette.types import ASGIApp

from controlplane.config.server_and_tenants import ServerSection
from controlplane.fleet_on_ray.box import at_root
from controlplane.fleet_on_ray.box_router import follow
from controlplane.fleet_on_ray.boxes_page import boxes_page
from controlplane.fleet_on_ray.known_boxes import known_boxes


class FleetPage:
    """The class of the deployment; it knows the boxes as a router does."""

    async def __init__(self, router_key: str, kinds: Mapping[str, str], server: ServerSection) -> None:  # type: ignore[misc]
        """Begins to follow the boxes. `kinds` has the name of each kind by the path of its boxes."""
        self._kinds, self._server = kinds, server
        self._polls = known_boxes(router_key).polls
        self._handles = follow(kinds.values())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The page, which Ray Serve binds to the port of the replica."""
        return at_root(boxes_page(self._polls.states, self._kinds, self._server))
