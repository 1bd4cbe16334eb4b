"""The rows of the decision log: `docs/decision-log.md` describes every field.

Rows are built from what the service knows anyway and hold numbers and names, never a text of a request. `at`
is in microseconds since the Unix epoch; every other time is in milliseconds, of a request from its arrival.
Random digits are most of what is left after compression, so none is written that no reader needs.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from controlplane.core.clock import Duration, Instant
from controlplane.core.decision import Admit, Outcome, Reject
from controlplane.core.forecast import LengthForecast
from controlplane.core.request import Kind, Request
from controlplane.core.slo import Slo
from controlplane.service.decision_history import Decided, Preempted
from controlplane.service.gate.explanation import decision_numbers, named_numbers
from controlplane.service.ticket import Ticket
from predictors.timing.online_step_time import StepTime

SCHEMA_VERSION = 2
KNOWN_VERSIONS = (1, 2)
"""Versions that can be read; each adds fields to those before."""
SIMULATED_RUN = "-simulated"
"""How the names of runs in virtual time end."""
Row = dict[str, Any]

FORECAST_LEVELS = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Quantile levels of the output tokens in `forecast`."""
MAX_INPUT_LENGTHS = 32
RESIDUAL_LEVELS = (0.1, 0.5, 0.9)
# Only of version 4: of the others the first half may be a time, and the same in many ids.
_UUID4 = re.compile(
    "([0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3})-[89ab][0-9a-f]{3}-[0-9a-f]{12}(?![0-9a-f])", re.IGNORECASE
)


def request_row(
    ticket: Ticket,
    at: int,
    *,
    tenant: str,
    blocks: Sequence[Sequence[int]],
    retry_of: str | None,
    has_numbers: bool,
) -> Row:
    """The row of an ended request; fields without a value are left out.

    Args:
        ticket: an ended request.
        at: its arrival.
        tenant: the salted hash of its tenant.
        blocks: the numbers of its prompt's blocks, as runs of [first, count].
        retry_of: the id of the rejected request that this one repeats, if known.
        has_numbers: adds the numbers behind each decision, the forecast TTFT and the longest gap.
    """
    request, timeline = ticket.request, ticket.timeline
    row: Row = {
        "row": "request",
        "at": at,
        "id": logged_id(request.id),
        "kind": request.kind.value,
        "class": request.service_class.name,
        "model": request.model,
        "tenant": tenant,
        "prompt_tokens": request.prompt_tokens,
        "sequences": request.sequences,
        "outcome": None if ticket.outcome is None else ticket.outcome.value,
        "decisions": _decision_rows(ticket, has_numbers=has_numbers),
        "e2e_ms": _ms(timeline.e2e),
    }
    if timeline.dispatched is not None:
        row["queue_ms"] = _ms(timeline.queue)
    if ticket.outcome is Outcome.LATE:
        row["missed"] = [name for name, is_met in timeline.objectives_met(request.slo).items() if not is_met]
    if stated := _stated(request):
        row["slo_ms"] = stated
    if retry_of is not None:
        row["retry_of"] = logged_id(retry_of)
    if request.kind is Kind.EMBED:
        row["input_tokens"] = thinned(ticket.input_lengths)
        return row
    row["max_output_tokens"] = request.max_output_tokens
    row["blocks"] = blocks
    if ticket.first_forecast is not None:
        row["forecast"] = forecast_tokens(ticket.first_forecast)
    if timeline.first_token is not None:
        row["ttft_ms"] = _ms(timeline.ttft)
        row["tpot_ms"] = _ms(timeline.tpot)
        if request.slo.gap is not None or has_numbers:
            row["gap_ms"] = _ms(timeline.gap)
        row["output_tokens"] = timeline.output_tokens
        row["cached_tokens"] = ticket.cache_hit_tokens
    if has_numbers and ticket.predicted_ttft is not None:
        row["predicted_ttft_ms"] = _ms(ticket.predicted_ttft)
    return row


def logged_id(request_id: str) -> str:
    """The id as rows have it: of a random UUID the first 18 characters, which hold 60 random bits.

    What is before and after the UUID stays, so the ids of a client and of its requests are shortened alike.
    """
    return _UUID4.sub(r"\1", request_id)


def thinned(lengths: Sequence[int]) -> list[int]:
    """The lengths in ascending order; of more than `MAX_INPUT_LENGTHS`, so many of evenly spaced rank."""
    ordered = sorted(lengths)
    if len(ordered) <= MAX_INPUT_LENGTHS:
        return ordered
    last = len(ordered) - 1
    return [ordered[round(at * last / (MAX_INPUT_LENGTHS - 1))] for at in range(MAX_INPUT_LENGTHS)]


def forecast_tokens(forecast: LengthForecast) -> list[int]:
    """Output tokens at `FORECAST_LEVELS`."""
    return [round(forecast.quantile(level)) for level in FORECAST_LEVELS]


def logged_history(row: Mapping[str, Any], service_class: Mapping[str, Any]) -> dict[str, object]:
    """The explanation of an ended request as `GET /admin/explain/ID` gives it, from its row.

    `service_class` is the section of its class in the configuration that was in force when it arrived.
    """
    keys = ("kind", "class", "prompt_tokens", "max_output_tokens", "model", "tenant", "retry_of")
    usual = {each.name: service_class.get(f"{each.name}_ms") for each in fields(Slo)}
    objectives = {name: value for name, value in usual.items() if value is not None} | row.get("slo_ms", {})
    measured = ("queue_ms", "ttft_ms", "tpot_ms", "e2e_ms", "gap_ms", "output_tokens", "cached_tokens")
    events = row["decisions"]
    by = [event.get("by") for event in events]
    forecast = row.get("forecast")
    return {
        "id": row["id"],
        "arrived_at": row["at"],
        "phase": "finished",
        "outcome": row["outcome"],
        "missed": row.get("missed", []),
        "request": {key: row[key] for key in keys if key in row}
        | {"priority": service_class.get("priority", 0), "objectives_ms": objectives},
        "decisions": [_named_event(event) for event in events],
        "predicted": {
            "ttft_ms": row.get("predicted_ttft_ms"),
            "output_tokens": None
            if forecast is None
            else {f"{level:g}": tokens for level, tokens in zip(FORECAST_LEVELS, forecast, strict=True)},
        },
        "measured": {key: row.get(key) for key in measured}
        | {"preemptions": {"gate": by.count("gate"), "engine": by.count("engine")}},
        "now": None,
    }


def step_coefficients(steps: StepTime) -> Row:
    """Seconds per step, sequence, KV cell and prompt token, and the relative errors of recent steps."""
    step, decode, cell, prompt_token = steps.coefficients
    return {
        "step_s": step,
        "decode_s": decode,
        "cell_s": cell,
        "prompt_token_s": prompt_token,
        "observed": steps.seen,
        "largest_tokens": steps.largest_tokens,
        "residuals": _quantiles(steps.relative_errors),
    }


def pass_coefficients(base: float, per_token: float, per_square: float, ratios: Iterable[float]) -> Row:
    """Seconds per pass, padded token, and padded token times length, and recent relative errors.

    `ratios` are observed times over those of an idle device.
    """
    return {
        "base_s": base,
        "token_s": per_token,
        "square_s": per_square,
        "residuals": _quantiles([ratio - 1 for ratio in ratios]),
    }


def _quantiles(values: Sequence[float]) -> list[float] | None:
    """Values at `RESIDUAL_LEVELS`; None without any."""
    ordered = sorted(values)
    if not ordered:
        return None
    return [round(ordered[min(int(q * len(ordered)), len(ordered) - 1)], 4) for q in RESIDUAL_LEVELS]


def _decision_rows(ticket: Ticket, *, has_numbers: bool) -> list[Row]:
    """Decisions and preemptions in order of time; the engine's are known, and in the history, later."""
    history = sorted(ticket.history, key=attrgetter("at"))
    return [_event_row(event, ticket.request, has_numbers=has_numbers) for event in history]


def _event_row(event: Decided | Preempted, request: Request, *, has_numbers: bool) -> Row:
    found: Row = {"at_ms": _ms(Duration(event.at - request.arrival))}
    if isinstance(event, Preempted):
        found |= {"decision": "PREEMPTED", "by": event.by}
        return found if event.beneficiary is None else found | {"for": logged_id(event.beneficiary)}
    decision, basis, is_plain = event.decision, event.basis, False
    if isinstance(decision, Admit):
        is_plain = not decision.victims
        found["decision"] = "ADMIT" if is_plain else "ADMIT_WITH_PREEMPTION"
        if not is_plain:
            found["victims"] = [logged_id(victim.request_id) for victim in decision.victims]
    else:
        found["decision"] = "REJECT" if isinstance(decision, Reject) else "DEFER"
        found["reason"] = decision.reason.value
        if isinstance(decision, Reject):
            found["retry_after_ms"] = _ms(decision.retry_after)
    if has_numbers and basis is not None:
        # The predicted peak costs most, and explains nothing of a request that was simply admitted.
        numbers = decision_numbers(basis, event.decision.wait, Instant(event.at), predicts_peak=not is_plain)
        found["numbers"] = [_four_digits(number) for number in numbers]
    return found


def _named_event(event: Mapping[str, Any]) -> dict[str, object]:
    numbers = event.get("numbers")
    rest = {key: value for key, value in event.items() if key != "numbers"}
    return rest if numbers is None else {**rest, **named_numbers(numbers)}


def _stated(request: Request) -> dict[str, float]:
    """The objectives that differ from those of the class."""
    usual: Slo = request.service_class.slo
    if request.slo is usual:
        return {}
    found = {}
    for each in fields(Slo):
        value = getattr(request.slo, each.name)
        if value is not None and value != getattr(usual, each.name):
            found[each.name] = value / 1e6
    return found


def _ms(duration: Duration | None) -> float | None:
    """Milliseconds: below 100 in steps of 0.1, then in whole ones, from 10 s on in four digits."""
    if duration is None or duration < 100_000_000:
        return None if duration is None else duration // 100_000 / 10
    whole = duration // 1_000_000
    return round(whole, 4 - len(str(whole)))


def _four_digits(number: float | None) -> float | None:
    """The number in four significant digits, without a fraction of zero."""
    if number is None:
        return None
    rounded = float(f"{number:.4g}")
    return int(rounded) if rounded.is_integer() else rounded
