"""Decides which rows of a log a replay may trust: sizes and objectives such as a request can have.

A log may come from anywhere. A size of a million million tokens must cost its row, not the host's memory.
"""

from controlplane.service.decision_log.log_rows import FORECAST_LEVELS, Row

MOST_TOKENS = 1 << 24
# Of the serial number of a block, which grows as long as a server runs; below `_OWN_TOKENS` in tokens.
_MOST_BLOCKS = 1 << 40
_MOST_SEQUENCES = 4_096
_OBJECTIVES = ("ttft", "tpot", "e2e", "gap")


def is_sound(row: Row) -> bool:
    """Whether a request row has everything that its replay needs, in bounds."""
    objectives, serial = row.get("slo_ms", {}), row["id"].rpartition("-")[2]
    if not (1 <= row["sequences"] <= _MOST_SEQUENCES and 1 <= row["prompt_tokens"] <= MOST_TOKENS):
        return False
    if not (serial.isdecimal() and len(serial) < 20 and isinstance(objectives, dict)):
        return False
    if not all(name in _OBJECTIVES and _is_positive(value) for name, value in objectives.items()):
        return False
    if not all(_is_time(row.get(name)) for name in ("ttft_ms", "e2e_ms")):
        return False
    if not all(isinstance(each, dict) for each in row["decisions"]):
        return False
    if not all(each.get("at_ms") is not None and _is_time(each["at_ms"]) for each in row["decisions"]):
        return False
    return _is_sound_embedding(row) if row["kind"] == "embed" else _is_sound_generation(row)


def _is_sound_embedding(row: Row) -> bool:
    lengths = row.get("input_tokens")
    if not isinstance(lengths, list) or not 1 <= len(lengths) <= row["sequences"]:
        return False
    return all(_is_count(tokens) and 1 <= tokens <= row["prompt_tokens"] for tokens in lengths)


def _is_sound_generation(row: Row) -> bool:
    limit, output = row.get("max_output_tokens", 0), row.get("output_tokens", 0)
    blocks, forecast = row.get("blocks", []), row.get("forecast")
    if (
        row["kind"] != "generate"
        or not _is_count(output)
        or not _is_count(limit)
        or not isinstance(blocks, list)
    ):
        return False
    if forecast is not None and not _is_sound_forecast(forecast):
        return False
    if not all(isinstance(run, list) and len(run) == 2 and all(map(_is_count, run)) for run in blocks):
        return False
    in_bounds = all(first < _MOST_BLOCKS for first, _ in blocks)
    return (
        in_bounds and 1 <= limit <= MOST_TOKENS and sum(count for _, count in blocks) <= row["prompt_tokens"]
    )


def _is_sound_forecast(forecast: object) -> bool:
    if not isinstance(forecast, list) or len(forecast) != len(FORECAST_LEVELS):
        return False
    return all(map(_is_count, forecast)) and forecast == sorted(forecast)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_time(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value >= 0)
