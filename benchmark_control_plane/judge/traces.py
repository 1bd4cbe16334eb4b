"""What arrived where it was recorded? Traces by name or by file with stated columns.

A row is one request: when, how long its prompt and its answer, and for retrieval how long the query
whose embedding it waits for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.arguments import BadInput
from benchmark_control_plane.common.row_files import column, rows


@dataclass(frozen=True, slots=True)
class TraceColumns:
    """Names in the file. Without `output` an answer is one token; `query` only where a query's embedding
    comes first."""

    at: str
    prompt: str
    output: str | None = None
    query: str | None = None


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """`at` in seconds since the first; lengths in tokens."""

    at: float
    prompt: int
    output: int
    query: int | None = None


_AZURE = TraceColumns("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_SERVEGEN = TraceColumns("arrival_s", "input_tokens", "output_tokens")
NAMED: Mapping[str, tuple[str, TraceColumns]] = {
    "azure-conversation": ("traces/azure2023_conv.csv.gz", _AZURE),
    "azure-code": ("traces/azure2023_code.csv.gz", _AZURE),
    "ragpulse": (
        "traces/ragpulse_two_stage.csv.gz",
        TraceColumns("arrival_s", "llm_input_tokens", "llm_output_tokens", "embed_query_tokens"),
    ),
    "servegen-steady": ("traces/servegen_msmall_client12_1tok_1h.csv.gz", _SERVEGEN),
    "servegen-bursty": ("traces/servegen_msmall_client14_bursty_1h.csv.gz", _SERVEGEN),
}


@lru_cache(maxsize=8)
def read_trace(path: Path, columns: TraceColumns) -> Sequence[TracedRequest]:
    """In order of time. Raises BadInput for a file without the columns, or with fewer than two rows."""
    found = sorted(_arrivals(path, columns), key=lambda one: one.at)
    if len(found) < 2:
        raise BadInput(f"{path}: {len(found)} rows; a trace has at least two")
    first = found[0].at
    return [TracedRequest(one.at - first, one.prompt, one.output, one.query) for one in found]


def _arrivals(path: Path, columns: TraceColumns) -> Iterator[TracedRequest]:
    for number, row in enumerate(rows(path), start=1):
        try:
            yield TracedRequest(
                _seconds(column(row, columns.at, path)),
                _tokens(column(row, columns.prompt, path)),
                1 if columns.output is None else _tokens(column(row, columns.output, path)),
                None if columns.query is None else _tokens(column(row, columns.query, path)),
            )
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"{path}: row {number}: {error}") from error


def _tokens(value: Any) -> int:
    # A request without a token is still a request.
    return max(1, round(float(value)))


def _seconds(value: Any) -> float:
    """A number of seconds, or a time of day and date."""
    try:
        seconds = float(value)
    except ValueError:
        # The traces write seven decimals of a second; Python takes six.
        head, dot, fraction = str(value).partition(".")
        seconds = datetime.fromisoformat(head + dot + fraction[:6]).replace(tzinfo=UTC).timestamp()
    if not isfinite(seconds):
        raise ValueError(f"{value!r} is no moment")
    return seconds
