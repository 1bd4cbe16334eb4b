"""What does the control plane hold now? For the operator alone, who has an own key."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from controlplane.api.auth import require_admin
from controlplane.api.settings import ApiSettings
from controlplane.api.status import json_response
from controlplane.service.assembly import Service


def admin_routes(service: Service, settings: ApiSettings) -> APIRouter:
    routes = APIRouter()

    @routes.get("/admin/state", response_model=None)
    async def show_state(request: Request) -> Response:
        require_admin(request.headers, settings)
        return json_response(service.state())

    return routes
