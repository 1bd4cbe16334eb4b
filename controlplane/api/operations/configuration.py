"""GET and PUT /admin/config, and POST /admin/config/rollback; they need the admin key."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from controlplane.api.auth import require_admin
from controlplane.api.body_parsing import parse_json
from controlplane.api.errors import Problem, down_headers
from controlplane.api.settings import settings_for
from controlplane.config import ConfigError
from controlplane.config.loader import yaml_content
from controlplane.core.errors import BackendDown, BackendFailed
from controlplane.service.reconfiguration import AppliedChange, GuardRequest, StaleVersion
from controlplane.service.runtime.change_guard import LONGEST_GUARD_S
from controlplane.service.service import Service

# The YAML parser takes about 10 us a byte.
_MAX_YAML_BYTES = 256 * 2**10
_LONGEST_CHANGE_MS = 86_400_000
_SOURCE = "x-tandem-source"
_SWITCH = {"true": True, "false": False}


def config_routes(service: Service) -> APIRouter:
    """Routes of /admin/config."""
    routes = APIRouter()

    @routes.get("/admin/config", response_model=None)
    async def show_config(request: Request) -> Response:
        require_admin(request)
        return _response(service.reconfiguration.to_json())

    @routes.put("/admin/config", response_model=None)
    async def change_config(request: Request) -> Response:
        """Applies a whole configuration or a part of one, and returns the outcome key by key."""
        require_admin(request)
        options = _options(request, "dry_run", "guard_ms", "for_ms", "drop")
        content = await _content(request)
        return await _changed(
            service.reconfiguration.change(
                content,
                source=_source(request, "PUT /admin/config"),
                expected=_expected(request),
                is_dry_run=switch(options, "dry_run"),
                guard=_guard(options),
            )
        )

    @routes.post("/admin/config/rollback", response_model=None)
    async def roll_back(request: Request) -> Response:
        """Puts an earlier version in force again, the one before the present by default."""
        require_admin(request)
        options = _options(request, "dry_run", "version")
        number = int(_number(options, "version", 1, 10**9)) if "version" in options else None
        return await _changed(
            service.reconfiguration.roll_back(
                number,
                source=_source(request, "POST /admin/config/rollback"),
                expected=_expected(request),
                is_dry_run=switch(options, "dry_run"),
            )
        )

    return routes


async def _changed(change: Any) -> Response:
    """The response of a change. Unlike other endpoints, it shows the operator the engine's own error text."""
    try:
        outcome: AppliedChange = await change
    except ConfigError as error:
        raise Problem(400, str(error), code="invalid_value") from None
    except StaleVersion as error:
        raise Problem(412, str(error), code="stale_version") from None
    except BackendDown as error:
        raise Problem(503, str(error), code="backend_down", headers=down_headers(error)) from None
    except BackendFailed as error:
        raise Problem(500, str(error), code="backend_failed") from None
    return _response(outcome.to_json())


def _response(body: Mapping[str, Any]) -> Response:
    try:
        text = orjson.dumps(body)
    except orjson.JSONEncodeError:
        # An engine argument may be an integer beyond 64 bits.
        text = json.dumps(body, separators=(",", ":")).encode()
    return Response(text, media_type="application/json", headers={"etag": body["etag"]})


async def _content(request: Request) -> object:
    """The body: YAML if its content type says so, else JSON. Raises Problem (400, 413)."""
    body = await request.body()
    if "yaml" not in request.headers.get("content-type", ""):
        return parse_json(body, settings_for(request).limits)
    if len(body) > _MAX_YAML_BYTES:
        raise Problem(
            413,
            f"the YAML text has {len(body):,} bytes; at most {_MAX_YAML_BYTES:,} are parsed, so send JSON",
            code="request_too_large",
        )
    try:
        return await asyncio.to_thread(yaml_content, body.decode(), source="change")
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is not UTF-8 at byte {error.start}", code="invalid_value") from None
    except ConfigError as error:
        raise Problem(400, str(error), code="invalid_value") from None


def _source(request: Request, usual: str) -> str:
    """Who changes the configuration, for the log and the list of versions."""
    stated = request.headers.get(_SOURCE, "")
    return stated[:80] if stated.isprintable() and stated else usual


def _expected(request: Request) -> frozenset[str] | None:
    """The ETags of `If-Match`; None without one, or for `*`."""
    stated = request.headers.get("if-match")
    return None if stated is None or stated.strip() == "*" else frozenset(map(str.strip, stated.split(",")))


def _options(request: Request, *known: str) -> dict[str, str]:
    """The query parameters. Raises Problem (400): a misspelt `dry_run` must not apply a change."""
    found = dict(request.query_params)
    if unknown := sorted(set(found) - set(known)):
        message = f"{unknown[0]}: unknown query parameter; known are {', '.join(known)}"
        raise Problem(400, message, param=unknown[0], code="unknown_parameter")
    return found


def switch(parameters: Mapping[str, str], name: str) -> bool:
    """A query parameter that is true, false or absent. Raises Problem (400) for another value."""
    value = parameters.get(name, "false")
    if value not in _SWITCH:
        message = f"{name}={value[:40]!r}: should be true or false"
        raise Problem(400, message, param=name, code="invalid_value")
    return _SWITCH[value]


def _guard(options: Mapping[str, str]) -> GuardRequest | None:
    """`guard_ms` watches a change; `for_ms` undoes it after that time, and watches it too with `drop`."""
    if "guard_ms" in options and "for_ms" in options:
        message = "for_ms: not with guard_ms; state drop to watch the change for the time of for_ms"
        raise Problem(400, message, param="for_ms", code="invalid_value")
    drop = _number(options, "drop", 0, 100) if "drop" in options else None
    if "for_ms" in options:
        longest = _LONGEST_CHANGE_MS if drop is None else LONGEST_GUARD_S * 1_000
        return GuardRequest(_number(options, "for_ms", 1, longest) / 1_000, drop, is_temporary=True)
    if "guard_ms" in options:
        seconds = _number(options, "guard_ms", 1, LONGEST_GUARD_S * 1_000) / 1_000
        return GuardRequest(seconds, 3.0 if drop is None else drop)
    if drop is not None:
        message = "drop: only with guard_ms or for_ms, the time for which attainment is watched; add one"
        raise Problem(400, message, param="drop", code="invalid_value")
    return None


def _number(options: Mapping[str, str], name: str, least: float, most: float) -> float:
    try:
        value = float(options[name])
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        message = f"{name}={options[name][:80]!r}: should be a number from {least:g} to {most:g}"
        raise Problem(400, message, param=name, code="invalid_value")
    return value
