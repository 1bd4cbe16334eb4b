"""The /admin endpoints for state and drain; they need the admin key."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from controlplane.api.auth import require_admin
from controlplane.api.operations.health import json_response
from controlplane.service.service import Service


def admin_routes(service: Service) -> APIRouter:
    """Routes of /admin/state and /admin/drain."""
    routes = APIRouter()

    @routes.get("/admin/state", response_model=None)
    async def show_state(request: Request) -> Response:
        require_admin(request)
        return json_response(service.status.state())

    @routes.post("/admin/drain", response_model=None)
    async def drain(request: Request) -> Response:
        """Rejects new and waiting requests and responds when no request runs any more.

        Only a restart admits requests again.
        """
        require_admin(request)
        await service.drain()
        return json_response({"status": "drained"})

    return routes
