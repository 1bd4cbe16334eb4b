"""Settings of the HTTP layer: API keys, limits, timeouts and the overload status."""

from dataclasses import dataclass

from controlplane.service.request_jobs import Caller

ANONYMOUS = Caller(tenant="default", allowed_classes=None)


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
class ApiSettings:
    """Without `api_keys` every caller is ANONYMOUS; without `admin_key_sha256` /admin is disabled."""

    api_keys: tuple[ApiKey, ...] = ()
    admin_key_sha256: str | None = None
    limits: BodyLimits = BodyLimits()
    overload_status: int = 429
    ready_timeout_s: float = 5.0
    stalled_client_s: float = 60.0
    """A client that reads no byte for this long counts as disconnected; until then it may hold a lease."""
