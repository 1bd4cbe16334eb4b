"""The page over all boxes of a fleet, and their addresses for Prometheus, at /fleet.

The page shows what the routers decide by: the last load report of each box. Its data needs the admin key, the
addresses need the key for /metrics, both as the boxes of the first kind have them configured.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from controlplane.api.auth import check_admin_key, check_metrics_key
from controlplane.api.error_dialects import response_of
from controlplane.api.errors import Problem
from controlplane.api.operations.dashboard import FLEET_MEDIA_TYPES, static_file
from controlplane.config.server_and_tenants import ServerSection
from controlplane.fleet_on_ray.kind_names import PAGE_PATH
from controlplane.fleet_on_ray.load_polls import BoxState

_METRICS_PATH = "__metrics_path__"


def boxes_page(
    states: Callable[[], Iterable[BoxState]], kinds: Mapping[str, str], server: ServerSection
) -> ASGIApp:
    """The application below `PAGE_PATH`.

    Args:
        states: all boxes, as they are now.
        kinds: name of each kind by the path that its boxes expect, "" for the first kind.
        server: has the digests of the keys.
    """

    async def show_page(request: Request) -> Response:
        return static_file("fleet.html", request)

    async def show_file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FLEET_MEDIA_TYPES:
            raise Problem(404, f"no such file; there are {', '.join(FLEET_MEDIA_TYPES)}", code="not_found")
        return static_file(name, request)

    async def list_boxes(request: Request) -> Response:
        """Every box with its kind, base URL and report, which is null while the box does not answer."""
        check_admin_key(request.headers, server.admin_key_sha256, of=f"{PAGE_PATH}/boxes")
        rows = ",".join(_row(state, _kind(state, kinds)) for state in states())
        return Response(f'{{"boxes":[{rows}]}}', media_type="application/json")

    async def list_targets(request: Request) -> Response:
        """Every box as a target of Prometheus' HTTP service discovery."""
        check_metrics_key(request.headers, server.metrics_key_sha256)
        return JSONResponse([_target(state, _kind(state, kinds)) for state in states()])

    async def report_problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return response_of(error.failure, request.scope)

    routes = [
        Route("/", show_page),
        Route("/boxes", list_boxes),
        Route("/targets", list_targets),
        Route("/{name}", show_file),
    ]
    return _with_a_slash(Starlette(routes=routes, exception_handlers={Problem: report_problem}))


def _with_a_slash(app: ASGIApp) -> ASGIApp:
    """The application, whose relative addresses need a path that ends in a slash."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "":
            await RedirectResponse(f"{PAGE_PATH.removeprefix('/')}/")(scope, receive, send)
        else:
            await app(scope, receive, send)

    return wrapped


def _kind(state: BoxState, kinds: Mapping[str, str]) -> str:
    return kinds[urlsplit(state.url).path]


def _row(state: BoxState, kind: str) -> str:
    stated = json.dumps({"name": state.name, "kind": kind, "url": state.url})[:-1]
    report = "null" if state.report is None else f"{{{state.report.body()}}}"
    return f'{stated},"report":{report}}}'


def _target(state: BoxState, kind: str) -> dict[str, object]:
    url = urlsplit(state.url)
    labels = {"kind": kind, _METRICS_PATH: f"{url.path}/metrics"}
    return {"targets": [url.netloc], "labels": labels}
