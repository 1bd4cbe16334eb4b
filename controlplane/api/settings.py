"""What may an operator set about the door? Limits, keys and the overload status."""

from dataclasses import dataclass

from controlplane.service.jobs import Caller

ANONYMOUS = Caller(tenant="default", allowed_classes=None)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`sha256` is the hex digest of the bearer key; the key itself is kept nowhere."""

    sha256: str
    caller: Caller


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Without `api_keys` everybody comes in as OPEN_DOOR; without `admin_key_sha256` nobody is admin."""

    api_keys: tuple[ApiKey, ...] = ()
    admin_key_sha256: str | None = None
    max_body_bytes: int = 8 * 1024 * 1024
    overload_status: int = 429
    ready_timeout_s: float = 5.0
    stalled_client_s: float = 60.0
    """A client that takes no byte for this long has left; until then it may hold a lease."""
