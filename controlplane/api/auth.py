"""Bearer-token authentication of tenants and of the operator against SHA-256 digests.

A key is compared with every configured digest in constant time, so the response time reveals nothing.
"""

from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.requests import Request

from controlplane.api.errors import Problem
from controlplane.api.settings import ApiSettings, settings_for
from controlplane.service.request_jobs import Caller

_CHALLENGE = {"www-authenticate": "Bearer"}


def caller_of(headers: Headers, settings: ApiSettings) -> Caller:
    """Returns the tenant of the bearer key or `x-api-key`, or `anonymous` if no key is configured.

    Raises Problem (401) if the key is missing or unknown.
    """
    if not settings.api_keys:
        return settings.anonymous
    # Anthropic's clients send the key in a header of their own.
    own = headers.get("x-api-key", "").strip()
    digest = _digest(own) if own and "authorization" not in headers else _bearer_digest(headers)
    found = [key.caller for key in settings.api_keys if compare_digest(key.sha256, digest)]
    if not found:
        raise Problem(
            401,
            "unknown API key; send a key of a configured tenant",
            code="invalid_api_key",
            headers=_CHALLENGE,
        )
    return found[0]


def require_admin(request: Request) -> None:
    """Raises Problem: 401 if the admin key is missing or wrong, 403 if none is configured."""
    check_admin_key(request.headers, settings_for(request).admin_key_sha256)


def check_admin_key(headers: Headers, wanted: str | None, *, of: str = "/admin") -> None:
    """Raises Problem: 401 if the key of the digest `wanted` is missing or wrong, 403 if there is no digest.

    `of` is the path that the error names.
    """
    if wanted is None:
        raise Problem(
            403,
            f"{of} is disabled because no admin key is configured; set server.admin_key_sha256",
            code="admin_disabled",
        )
    if not compare_digest(wanted, _bearer_digest(headers)):
        raise Problem(
            401,
            "unknown admin key; send the configured key, or without one that of the server's present start",
            code="invalid_api_key",
            headers=_CHALLENGE,
        )


def require_router(request: Request) -> None:
    """Lets the operator and the routers of a fleet pass. Raises Problem as `require_admin` does."""
    wanted = settings_for(request).router_key_sha256
    if wanted is None or not compare_digest(wanted, _bearer_digest(request.headers)):
        require_admin(request)


def is_router_key(key: bytes, settings: ApiSettings) -> bool:
    """Whether this is the key of the routers, if one is configured."""
    wanted = settings.router_key_sha256
    return wanted is not None and compare_digest(wanted, sha256(key).hexdigest())


def check_metrics_key(headers: Headers, wanted: str | None) -> None:
    """Raises Problem (401) if there is a digest `wanted` and the headers have another key or none."""
    if wanted is not None and not compare_digest(wanted, _bearer_digest(headers)):
        raise Problem(
            401,
            "unknown key for /metrics; send the configured key",
            code="invalid_api_key",
            headers=_CHALLENGE,
        )


def _bearer_digest(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Problem(
            401,
            "no API key; send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers=_CHALLENGE,
        )
    return _digest(key.strip())


def _digest(key: str) -> str:
    return sha256(key.encode("latin-1")).hexdigest()
