"""Settings of the HTTP layer: API keys, limits, timeouts and the overload status.

They follow from one version of the configuration. Each request takes those in force when it begins, and keeps
them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from starlette.requests import Request

from controlplane.config import Config
from controlplane.config.server_and_tenants import ServerSection
from controlplane.core.clock import Duration, milliseconds
from controlplane.service.request_jobs import Caller, RequestTerms
from controlplane.service.service import Service

ANONYMOUS = Caller(tenant="default", allowed_classes=None)
ARRIVAL = "arrival"
"""Key of a request's arrival (`Instant` of the host's monotonic clock) in the state of its ASGI scope."""
SETTINGS = "settings"
"""Key of a request's `ApiSettings` in the state of its ASGI scope."""

# The defaults of the configuration.
_SERVER = ServerSection()
_LIMITS = _SERVER.limits
_QUEUE_DELAY = milliseconds(_LIMITS.max_queue_delay_ms)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key of a tenant; `sha256` is its hex digest, and the key itself is not stored."""

    sha256: str
    caller: Caller


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bounds of a request body; the fields are keys of `server.limits`."""

    max_body: int = _LIMITS.body_bytes(context_tokens=0)
    inline_body: int = _LIMITS.inline_body
    body_memory: int = _LIMITS.body_memory
    max_depth: int = _LIMITS.max_depth
    max_members: int = _LIMITS.max_members
    max_values: int = _LIMITS.body_values(context_tokens=0)
    max_strings: int = _LIMITS.max_strings
    max_name: int = _LIMITS.max_name


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of a connection; the fields are keys of `server` and `server.limits`, plain times in seconds."""

    max_header_bytes: int = _LIMITS.max_header_bytes
    max_headers: int = _LIMITS.max_headers
    header_timeout: float = _LIMITS.header_timeout_ms / 1_000
    body_timeout: float = _LIMITS.body_timeout_ms / 1_000
    stalled_client: float = _SERVER.stalled_client_ms / 1_000
    idle_timeout: float = _LIMITS.idle_timeout_ms / 1_000
    max_queue_delay: Duration = _QUEUE_DELAY


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Without `api_keys` every caller is `anonymous`.

    Without `admin_key_sha256` /admin is disabled; without `metrics_key_sha256` /metrics needs no key; without
    `router_key_sha256` no answer carries a load report; without `trace_share` no request is traced.
    """

    api_keys: tuple[ApiKey, ...] = ()
    admin_key_sha256: str | None = None
    metrics_key_sha256: str | None = None
    router_key_sha256: str | None = None
    limits: BodyLimits = BodyLimits()
    connection: ConnectionLimits = ConnectionLimits()
    overload_status: int = _SERVER.overload_status
    has_access_log: bool = True
    trace_share: float | None = None
    anonymous: Caller = ANONYMOUS


SettingsSource = Callable[[], ApiSettings]
"""Returns the settings in force."""


def settings_of(config: Config, terms: RequestTerms | None = None, *, context_tokens: int) -> ApiSettings:
    """The HTTP layer's part of a configuration; `context_tokens`: of the chat model, 0 without one.

    `terms` are those of the same version.
    """
    limits = config.server.limits
    keys = tuple(
        ApiKey(digest, Caller(name, None if tenant.classes is None else frozenset(tenant.classes), terms))
        for name, tenant in config.tenants.items()
        for digest in tenant.api_keys_sha256
    )
    return ApiSettings(
        api_keys=keys,
        admin_key_sha256=config.server.admin_key_sha256,
        metrics_key_sha256=config.server.metrics_key_sha256,
        router_key_sha256=config.server.router_key_sha256,
        limits=BodyLimits(
            max_body=limits.body_bytes(context_tokens),
            inline_body=limits.inline_body,
            body_memory=limits.body_memory,
            max_depth=limits.max_depth,
            max_members=limits.max_members,
            max_values=limits.body_values(context_tokens),
            max_strings=limits.max_strings,
            max_name=limits.max_name,
        ),
        connection=ConnectionLimits(
            max_header_bytes=limits.max_header_bytes,
            max_headers=limits.max_headers,
            header_timeout=limits.header_timeout_ms / 1_000,
            body_timeout=limits.body_timeout_ms / 1_000,
            stalled_client=config.server.stalled_client_ms / 1_000,
            idle_timeout=limits.idle_timeout_ms / 1_000,
            max_queue_delay=milliseconds(limits.max_queue_delay_ms),
        ),
        overload_status=config.server.overload_status,
        has_access_log=config.log.access,
        trace_share=None if config.tracing.endpoint is None else config.tracing.sample,
        anonymous=Caller(ANONYMOUS.tenant, None, terms),
    )


def live_settings(service: Service, start_key_sha256: str | None = None) -> SettingsSource:
    """The settings of the version in force, built once for each version; before the start, for no context.

    `start_key_sha256`: digest of the admin key while the configuration has none.
    """
    versions = service.reconfiguration
    built: tuple[object, bool, ApiSettings] | None = None

    def current() -> ApiSettings:
        nonlocal built
        active, is_started = versions.active, service.is_started
        if built is None or built[0] is not active or built[1] is not is_started:
            context_tokens = service.status.context_tokens() if is_started else 0
            settings = settings_of(active.config, active.terms, context_tokens=context_tokens)
            if settings.admin_key_sha256 is None:
                settings = replace(settings, admin_key_sha256=start_key_sha256)
            built = active, is_started, settings
        return built[2]

    return current


def settings_for(request: Request) -> ApiSettings:
    """The settings that a request began with."""
    found: ApiSettings = request.scope["state"][SETTINGS]
    return found
