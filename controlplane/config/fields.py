"""Types of configuration values, with their limits: sizes, times, fractions, counts, names, key hashes."""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from controlplane.core.clock import Duration, milliseconds

STRICT = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False, arbitrary_types_allowed=True)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class ConfigError(ValueError):
    """The configuration is invalid; the message has one line per mistake."""


def parse_bytes(value: object) -> int:
    """Parses a number of bytes, or a text with a decimal or binary unit. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if not match or match[2].upper() not in _UNITS or isinstance(value, bool):
        raise ValueError("should be a number of bytes or a text like 512MiB or 80GB")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size >= 2**60:
        raise ValueError("should be below 1 EiB")
    return round(size)


def bytes_or_auto(value: object) -> object:
    """Parses a size, or the word `auto`. Raises ValueError."""
    try:
        return value if value == "auto" else parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def sha256_digest(value: object) -> object:
    """Checks the SHA-256 digest of an API key. Raises ValueError."""
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError('should be the hash of the key, 64 of 0-9 a-f: printf %s "$KEY" | sha256sum')
    return value


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
BytesOrAuto = Annotated[int | Literal["auto"], BeforeValidator(bytes_or_auto)]
# From a microsecond to a day.
Milliseconds = Annotated[float, Field(ge=0.001, le=86_400_000)]
MillisecondsFromZero = Annotated[float, Field(ge=0, le=86_400_000)]
# With a shorter limit a busy engine would be killed.
StallMilliseconds = Annotated[float, Field(ge=1_000, le=86_400_000)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Positive = Annotated[int, Field(ge=1, le=10**9)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Sha256 = Annotated[str, BeforeValidator(sha256_digest)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


def optional_duration(value_ms: float | None) -> Duration | None:
    """Converts milliseconds above 0 to a duration of at least a nanosecond; None stays None."""
    return None if value_ms is None else Duration(max(1, milliseconds(value_ms)))
