"""The /admin endpoints for state, load, live feed and drain; they need the admin key."""

from secrets import token_hex

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from controlplane.api.auth import require_admin, require_router
from controlplane.api.errors import Problem
from controlplane.api.operations.configuration import switch
from controlplane.api.operations.health import json_response
from controlplane.service.service import Service

_MAX_DIGITS = 18


def admin_routes(service: Service) -> APIRouter:
    """Routes of /admin/state, /admin/live, /admin/load and /admin/drain."""
    routes = APIRouter()
    instance = token_hex(8)

    @routes.get("/admin/state", response_model=None)
    async def show_state(request: Request) -> Response:
        require_admin(request)
        return json_response({**service.status.state(), "classes": service.live.attainment()})

    @routes.get("/admin/live", response_model=None)
    async def show_live(request: Request) -> Response:
        """Returns the samples and events after number `since`, at most 64 KiB of them, oldest first."""
        require_admin(request)
        body = service.live.since(_since(request.query_params.get("since", "0")), instance)
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    @routes.get("/admin/load", response_model=None)
    async def show_load(request: Request) -> Response:
        """Returns the load report for routers; the key of the routers suffices.

        Tokens by tenant and the digest of the prefix cache make it larger, and are added on demand.
        """
        require_router(request)
        tenants, prefixes = (switch(request.query_params, name) for name in ("tenants", "prefixes"))
        load = service.load_reporter
        body = load.whole(has_tenants=tenants, has_prefixes=prefixes) if tenants or prefixes else load.text()
        return Response(body, media_type="application/json")

    @routes.post("/admin/drain", response_model=None)
    async def drain(request: Request) -> Response:
        """Rejects new and waiting requests and responds when no request runs any more.

        Only a restart admits requests again.
        """
        require_admin(request)
        await service.drain()
        return json_response({"status": "drained"})

    return routes


def _since(given: str) -> int:
    if not given.isascii() or not given.isdigit() or len(given) > _MAX_DIGITS:
        message = (
            f"since={given[:80]!r}: should be the `next` of the last answer, a number from 0; send 0 for all"
        )
        raise Problem(400, message, param="since", code="invalid_value")
    return int(given)
