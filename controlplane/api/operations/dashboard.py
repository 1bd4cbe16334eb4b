"""The operator's dashboard at /dashboard, and the links at /.

The pages are static files and hold nothing of the service: their script reads /admin/live with the admin key
that the operator enters. All addresses are relative, so a proxy may serve them under a path prefix.
"""

import gzip
from functools import cache
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from controlplane import __version__
from controlplane.api.errors import Problem
from controlplane.api.operations.health import json_response

FOLDER = files("controlplane.api") / "dashboard"
_SCRIPTS = ("charts", "dashboard", "explain", "feed", "format", "panels", "steer", "tables")
MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "links.html": "text/html; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
    **dict.fromkeys(
        (f"{name}.js" for name in _SCRIPTS),
        "text/javascript; charset=utf-8",
    ),
}
"""The files that are served, by name."""
FLEET_MEDIA_TYPES = {
    "fleet.html": MEDIA_TYPES["index.html"],
    "fleet.js": MEDIA_TYPES["dashboard.js"],
    **{name: MEDIA_TYPES[name] for name in ("dashboard.css", "feed.js", "format.js")},
}
"""The files of the page over the boxes of a fleet, which the fleet serves (`controlplane.fleet_on_ray`)."""
_ALL_MEDIA_TYPES = MEDIA_TYPES | FLEET_MEDIA_TYPES
LINKS = {
    "dashboard": "dashboard/",
    "models": "v1/models",
    "health": "health",
    "ready": "ready",
    "metrics": "metrics",
    "version": "version",
    "openapi": "openapi.json",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept, accept-encoding",
}


def dashboard_routes() -> APIRouter:
    """Routes of / and /dashboard."""
    routes = APIRouter()

    @routes.get("/", response_model=None, include_in_schema=False)
    async def show_links(request: Request) -> Response:
        """The links of this server: a page for a browser, JSON for other clients."""
        if "text/html" in request.headers.get("accept", ""):
            return static_file("links.html", request)
        return json_response({"name": "tandem", "version": __version__, "links": LINKS})

    @routes.get("/dashboard", response_model=None, include_in_schema=False)
    async def redirect() -> Response:
        return Response(status_code=307, headers={"location": "dashboard/"})

    @routes.get("/dashboard/", response_model=None, include_in_schema=False)
    async def show_dashboard(request: Request) -> Response:
        return static_file("index.html", request)

    @routes.get("/dashboard/{name}", response_model=None, include_in_schema=False)
    async def show_file(request: Request, name: str) -> Response:
        if name not in MEDIA_TYPES:
            raise Problem(404, f"no such file; the dashboard has {', '.join(MEDIA_TYPES)}", code="not_found")
        return static_file(name, request)

    return routes


@cache
def _content(name: str) -> tuple[bytes, bytes, str]:
    """A file's bytes, its bytes compressed, and its entity tag."""
    content = (FOLDER / name).read_bytes()
    return content, gzip.compress(content, 9, mtime=0), f'"{sha256(content).hexdigest()[:16]}"'


def static_file(name: str, request: Request) -> Response:
    """The response with a file of `FOLDER`: compressed, with an entity tag and a strict security policy."""
    content, compressed, tag = _content(name)
    headers = {**_HEADERS, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["content-encoding"] = compressed, "gzip"
    return Response(content, media_type=_ALL_MEDIA_TYPES[name], headers=headers)
