"""Section `log`: the form of log lines, their level, repeated warnings, and the access log."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT


@section(frozen=True, config=STRICT)
class LogSection:
    """Log lines on standard error."""

    format: Literal["text", "json"] = "text"
    """`json` writes one JSON object per line, with `at`, `level`, `logger`, `message` and the fields of the
    access log."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines below this level are not written."""
    repeat_ms: Annotated[float, Field(ge=0, le=86_400_000)] = 10_000
    """A warning or error with the same text is written once in this time, and the next one says how many were
    left out; lines with a traceback are always written. 0 writes all."""
    access: bool = True
    """Write one line for each HTTP request at its end: status, times, tokens, decision and outcome. Of
    `/health`, `/ready`, `/metrics`, `/admin/live` and `/admin/load` only those that failed."""
