"""Settings of the HTTP layer: API keys, limits, timeouts and the overload status."""

from dataclasses import dataclass

from controlplane.service.request_jobs import Caller

ANONYMOUS = Caller(tenant="default", allowed_classes=None)
ARRIVAL = "arrival"
"""Key of a request's arrival (`Instant` of the host's monotonic clock) in the state of its ASGI scope."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key of a tenant; `sha256` is its hex digest, and the key itself is not stored."""

    sha256: str
    caller: Caller


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bounds of a request body; the fields are keys of `server.limits`."""

    max_body: int = 4_800_000
    inline_body: int = 65_536
    max_depth: int = 64
    max_members: int = 20_000
    max_values: int = 400_000
    max_name: int = 1_024


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of a connection; the fields are keys of `server` and `server.limits`, times in seconds."""

    max_header_bytes: int = 65_536
    max_headers: int = 100
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    stalled_client: float = 60.0


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Without `api_keys` every caller is ANONYMOUS.

    Without `admin_key_sha256` /admin is disabled; without `metrics_key_sha256` /metrics needs no key; without
    `router_key_sha256` no answer carries a load report.
    """

    api_keys: tuple[ApiKey, ...] = ()
    admin_key_sha256: str | None = None
    metrics_key_sha256: str | None = None
    router_key_sha256: str | None = None
    limits: BodyLimits = BodyLimits()
    overload_status: int = 429
    ready_timeout_s: float = 5.0
