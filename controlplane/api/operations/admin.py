"""The /admin endpoints for state, load, configuration and drain; they need the admin key."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from controlplane.api.auth import require_admin, require_router
from controlplane.api.body_parsing import parse_json
from controlplane.api.errors import Problem
from controlplane.api.operations.health import json_response
from controlplane.api.settings import ApiSettings
from controlplane.config import ConfigError
from controlplane.config.reconfigure import changeable
from controlplane.core.errors import BackendDown, BackendFailed
from controlplane.service.service import Service


def admin_routes(service: Service, settings: ApiSettings) -> APIRouter:
    """Routes of /admin/state, /admin/load, /admin/config and /admin/drain."""
    routes = APIRouter()

    @routes.get("/admin/state", response_model=None)
    async def show_state(request: Request) -> Response:
        require_admin(request.headers, settings)
        return json_response(service.status.state())

    @routes.get("/admin/load", response_model=None)
    async def show_load(request: Request) -> Response:
        """Returns the load report for routers; the key of the routers suffices.

        Tokens by tenant and the digest of the prefix cache make it larger, and are added on demand.
        """
        require_router(request.headers, settings)
        tenants, prefixes = _flag(request, "tenants"), _flag(request, "prefixes")
        load = service.load_reporter
        body = load.whole(has_tenants=tenants, has_prefixes=prefixes) if tenants or prefixes else load.text()
        return Response(body, media_type="application/json")

    @routes.get("/admin/config", response_model=None)
    async def show_config(request: Request) -> Response:
        require_admin(request.headers, settings)
        return json_response(changeable(service.config))

    @routes.post("/admin/drain", response_model=None)
    async def drain(request: Request) -> Response:
        """Rejects new and waiting requests and responds when no request runs any more.

        Only a restart admits requests again.
        """
        require_admin(request.headers, settings)
        await service.drain()
        return json_response({"status": "drained"})

    @routes.put("/admin/config", response_model=None)
    async def change_config(request: Request) -> Response:
        """Changes the keys in the body and returns all changeable values.

        Unlike other endpoints, it shows the operator the engine's own error text.
        """
        require_admin(request.headers, settings)
        try:
            await service.reconfigure(parse_json(await request.body(), settings.limits))
        except ConfigError as error:
            raise Problem(400, str(error), code="invalid_value") from None
        except BackendDown as error:
            raise Problem(503, str(error), code="backend_down") from None
        except BackendFailed as error:
            raise Problem(500, str(error), code="backend_failed") from None
        return json_response(changeable(service.config))

    return routes


def _flag(request: Request, name: str) -> bool:
    """A query parameter that is true, false or absent. Raises Problem (400) for another value."""
    value = request.query_params.get(name, "false")
    if value not in ("true", "false"):
        message = f"{name}={value[:40]!r}: should be true or false"
        raise Problem(400, message, param=name, code="invalid_value")
    return value == "true"
