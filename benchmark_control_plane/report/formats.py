"""Formats figures for people: three significant digits, a unit, a dash for a value that was not measured."""

import json

ABSENT = "—"
_TIMES = "\N{MULTIPLICATION SIGN}"
METRIC_NAMES = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
    "tbt_ms": "Gap between tokens",
    "e2e_ms": "Time to the last token",
}
DECISION_NAMES = {
    "admit": "admitted",
    "admit_with_preemption": "admitted with preemption",
    "defer": "deferred",
    "reject": "rejected",
}
OUTCOME_NAMES = {
    "MET": "objective met",
    "LATE": "late",
    "REJECTED": "rejected",
    "EVICTED": "evicted",
    "ABORTED": "aborted",
    "FAILED": "failed",
}


def share(value: float | None) -> str:
    """0.125 is "12.5 %"; values close to 0 or 1 are not rounded to them."""
    if value is None:
        return ABSENT
    percent = 100 * value
    if 0 < percent < 0.05:
        return "< 0.1 %"
    if 99.95 < percent < 100:
        return "> 99.9 %"
    return f"{percent:.1f}".removesuffix(".0") + " %"


def figure(value: float | None) -> str:
    """Three significant digits, with thousands separators."""
    if value is None:
        return ABSENT
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def count(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.0f}"


def several(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def milliseconds(value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{figure(value)} ms" if value < 10_000 else f"{figure(value / 1000)} s"


def rate(value: float | None) -> str:
    return ABSENT if value is None else f"{figure(value)} req/s"


def reached(value: float | None, *, is_limit: bool) -> str:
    """A rate; with `is_limit` a lower bound, because no offered load was high enough."""
    return f"{'at least ' if is_limit else ''}{rate(value)}"


def load(value: float) -> str:
    return f"{100 * value:.0f} %"


def times(value: float) -> str:
    return (f"{value:.2f}" if value < 10 else f"{value:.0f}") + _TIMES


def spread(low: float, high: float) -> str:
    """Both ends, or one if they are formatted alike."""
    ends = figure(low), figure(high)
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def reached_range(low: float, high: float, *, is_limit: bool) -> str:
    """Range of rates over the seeds; 0 is no offered rate, with `is_limit` the upper end a lower bound."""
    least, most = figure(low) if low else "none", f"{'at least ' if is_limit else ''}{figure(high)}"
    return most if figure(low) == figure(high) else f"{least} to {most}"


def yaml_value(value: object) -> str:
    """A value of a configuration as YAML writes it; texts without quotes."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
