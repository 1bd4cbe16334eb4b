"""Section `server` (address, limits, drain) and section `tenants` (API keys, rate limits, weights)."""

from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Milliseconds, Sha256
from controlplane.config.limits_section import LimitsSection

# A lower rate would give Retry-After times of hours.
PerMinute = Annotated[float, Field(ge=0.01)]


@section(frozen=True, config=STRICT)
class ServerSection:
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts connections from other machines, which needs `tenants` or
    `open: true`."""
    open: bool = False
    """Serves clients of other machines without a key. Without it, an address that other machines reach needs
    `tenants`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """TCP port; 0 takes any free port."""
    cors: tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")], ...] = ()
    """Origins of web pages whose scripts may call the API, such as https://app.example; `*` allows all."""
    health_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """TCP port of another listener for `/health` and `/ready`, served by a process of its own so that no load
    delays them; 0 takes any free port. By default only `port` serves them."""
    limits: LimitsSection = LimitsSection()
    """What one request may cost."""
    overload_status: Literal[429, 503] = 429
    """HTTP status of a request rejected because of load."""
    drain_ms: Milliseconds = 30_000
    """After SIGTERM, running requests may finish for this long; waiting requests are rejected at once."""
    stalled_client_ms: Milliseconds = 60_000
    """A client that reads no byte for this long is disconnected, and its request is aborted; so is one that
    reads less than 16 KiB/s of a finished response for this long."""
    admin_key_sha256: Sha256 | None = None
    """SHA-256 (hex) of the key for /admin. Without it /admin is disabled, but on an address that only this
    machine reaches `tandem serve` makes a key at each start and names its file."""
    metrics_key_sha256: Sha256 | None = None
    """SHA-256 (hex) of the key for /metrics; without it /metrics needs no key."""
    vllm_metric_names: bool = False
    """`/metrics` repeats the chat model's series under vLLM's names (docs/metrics.md), for routers such as
    llm-d's and dashboards that know vLLM. The page is then at most 0.2 s old. Off by default, because
    sums over servers of both kinds may count requests twice."""
    router_key_sha256: Sha256 | None = None
    """SHA-256 (hex) of the key of a fleet's routers. The key opens `/admin/load`, and an answer to a request
    with the key as `x-tandem-router-key` carries `x-tandem-load`. Without it none does."""
    explain_requests: Annotated[int, Field(ge=0, le=100_000)] = 1_000
    """Ended requests whose decisions `GET /admin/explain/ID` still shows; 0: none. A decision takes about
    20 KiB at 256 running requests."""

    def is_local(self) -> bool:
        """Whether only this machine reaches the address."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            # A name. An empty one is refused before the server listens.
            return self.host in ("", "localhost")


@section(frozen=True, config=STRICT)
class TenantSection:
    """A tenant, by name. Without tenants every request is accepted without a key."""

    api_keys_sha256: Annotated[tuple[Sha256, ...], Field(min_length=1)]
    """SHA-256 (hex) of each API key of the tenant; a key belongs to one tenant."""
    classes: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Service classes that the tenant may use; all by default."""
    weight: Annotated[float, Field(gt=0, le=1_000)] | None = None
    """Share of each engine relative to other tenants with waiting requests; 1 if only others state one.
    If no tenant states a weight, scheduling ignores tenants."""
    requests_per_minute: PerMinute | None = None
    """Rate limit (token bucket of one minute); no limit by default."""
    tokens_per_minute: PerMinute | None = None
    """Rate limit of prompt and output tokens; output is charged when a request ends, and a log probability
    in it as a tenth of a token. No limit by default."""
