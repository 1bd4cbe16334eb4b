"""Reads recorded traces, known by name or from a file with given columns.

A row is one request: arrival time, prompt and output tokens and, for retrieval, the tokens of the query whose
embedding precedes it. Where a recording has the pieces of its prompts, a row has the shared prefix, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.common.row_files import column, rows
from benchmark_control_plane.judge.prompt_pieces import in_order, piece_tokens, shared_prefixes
from controlplane.config.fields import STRICT, Name


@dataclass(frozen=True)
class TraceColumns:
    """Column names; without `output` every output is one token, `query` is for retrieval only.

    `pieces` are those of a prompt, in a trace in the form of RAGPulse.
    """

    __pydantic_config__: ClassVar = STRICT

    at: Name
    prompt: Name
    output: Name | None = None
    query: Name | None = None
    pieces: Name | None = None


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One row; `at` in seconds since the first row, lengths in tokens; `prefix` is empty without pieces."""

    at: float
    prompt: int
    output: int
    query: int | None = None
    prefix: str = ""
    prefix_tokens: int = 0


_AZURE = TraceColumns("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_SERVEGEN = TraceColumns("arrival_s", "input_tokens", "output_tokens")
NAMED: Mapping[str, tuple[str, TraceColumns]] = {
    "azure-conversation": ("traces/azure2023_conv.csv.gz", _AZURE),
    "azure-code": ("traces/azure2023_code.csv.gz", _AZURE),
    "ragpulse": (
        "traces/ragpulse_two_stage.csv.gz",
        TraceColumns("arrival_s", "llm_input_tokens", "llm_output_tokens", "embed_query_tokens"),
    ),
    "ragpulse-prompts": (
        "traces/ragpulse_0_trace.jsonl.gz",
        TraceColumns("timestamp", "input_length", "output_length", pieces="hash_ids"),
    ),
    "servegen-steady": ("traces/servegen_msmall_client12_1tok_1h.csv.gz", _SERVEGEN),
    "servegen-bursty": ("traces/servegen_msmall_client14_bursty_1h.csv.gz", _SERVEGEN),
}


@lru_cache(maxsize=8)
def read_trace(path: Path, columns: TraceColumns) -> Sequence[TracedRequest]:
    """Rows in order of time; raises BadInput if columns are missing or there are fewer than two rows."""
    found = sorted(_arrivals(path, columns), key=lambda row: row.at)
    if len(found) < 2:
        raise BadInput(f"{path}: {len(found)} rows; a trace needs at least two")
    first = found[0].at
    return [replace(row, at=row.at - first) for row in found]


def _arrivals(path: Path, columns: TraceColumns) -> Iterator[TracedRequest]:
    found = list(rows(path))
    prefixes = _prefixes(found, columns, path)
    for number, (row, prefix) in enumerate(zip(found, prefixes, strict=True), start=1):
        try:
            yield TracedRequest(
                _seconds(column(row, columns.at, path)),
                _tokens(column(row, columns.prompt, path)),
                1 if columns.output is None else _tokens(column(row, columns.output, path)),
                None if columns.query is None else _tokens(column(row, columns.query, path)),
                *prefix,
            )
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"{path}: row {number}: {error}") from error


def _prefixes(
    found: Sequence[Mapping[str, Any]], columns: TraceColumns, path: Path
) -> Sequence[tuple[str, int]]:
    if columns.pieces is None:
        return [("", 0)] * len(found)
    try:
        prompts = [in_order(column(row, columns.pieces, path)) for row in found]
        return shared_prefixes(prompts, piece_tokens(path))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{path}: {columns.pieces}: not pieces with known tokens: {error!r}") from error


def _tokens(value: Any) -> int:
    # A row with zero tokens is still a request.
    return max(1, round(float(value)))


def _seconds(value: Any) -> float:
    """Seconds from a number or an ISO 8601 timestamp."""
    try:
        seconds = float(value)
    except ValueError:
        # The Azure traces have seven decimals of a second; Python parses six.
        head, dot, fraction = str(value).partition(".")
        seconds = datetime.fromisoformat(head + dot + fraction[:6]).replace(tzinfo=UTC).timestamp()
    if not isfinite(seconds):
        raise ValueError(f"{value!r} is not a time")
    return seconds
