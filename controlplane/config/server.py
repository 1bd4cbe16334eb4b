"""Who is let in, and where? The door's own settings and its keys."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Bytes, Milliseconds, Sha256

# Below, the time in which a debt is paid off is none that could be told.
PerMinute = Annotated[float, Field(ge=0.01)]


@section(frozen=True, config=STRICT)
class ServerSection:
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    max_body: Annotated[Bytes, Field(ge=1)] = 32 * 2**20
    overload_status: Literal[429, 503] = 429
    drain_ms: Milliseconds = 30_000
    stalled_client_ms: Milliseconds = 60_000
    admin_key_sha256: Sha256 | None = None


@section(frozen=True, config=STRICT)
class TenantSection:
    """Where any tenant states a `weight`, those that have work share each engine by it."""

    api_keys_sha256: Annotated[tuple[Sha256, ...], Field(min_length=1)]
    classes: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    weight: Annotated[float, Field(gt=0, le=1_000)] | None = None
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
