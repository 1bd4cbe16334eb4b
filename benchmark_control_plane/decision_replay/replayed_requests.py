"""What came of each request, in the log and in a replay, in one form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from benchmark_control_plane.decision_replay.recorded_traffic import LoggedForecasts, RecordedTraffic
from benchmark_control_plane.decision_replay.static_shares import with_shares
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import SimulatedRecord, simulate
from controlplane.service.decision_log.log_rows import Row

# Length predictors that read no prompt.
_WITHOUT_PROMPTS = ("history", "max-tokens")

Group = tuple[str, str]
"""Class and kind of requests."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What came of one request; `latency_ms` is to the first token, of an embedding request to its end."""

    outcome: str
    latency_ms: float | None

    @property
    def is_served(self) -> bool:
        """Whether it finished."""
        return self.outcome in ("met", "late")


@dataclass(frozen=True, slots=True)
class Summary:
    """Attainment and reject share of some requests, and quantiles of the latency of the served ones."""

    requests: int
    served: int
    attainment: float
    rejected: float
    p50_ms: float | None
    p90_ms: float | None


def logged_results(rows: Sequence[Row]) -> list[RequestResult]:
    """What the log says."""
    return [
        RequestResult(row["outcome"], row["e2e_ms"] if row["kind"] == "embed" else row.get("ttft_ms"))
        for row in rows
    ]


def replayed_results(
    traffic: RecordedTraffic,
    sections: Mapping[str, Any],
    *,
    machine: Machine | None = None,
    seed: int = 0,
    is_block: bool = False,
) -> list[RequestResult]:
    """What the live gate and engine policies do with the same requests. Raises ConfigError.

    A length predictor that needs no prompts learns again as it did; in place of any other, each request has
    the forecast that it had. In a block of a log, `history` could not learn what it knew by then, so there
    each request has its forecast, too.
    """
    records = replayed_records(traffic, sections, machine=machine, seed=seed, is_block=is_block)
    return results_of(traffic.rows, records)


def results_of(rows: Sequence[Row], records: Sequence[SimulatedRecord]) -> list[RequestResult]:
    """What came of the rows' requests by the records of their replay."""
    return [_result(record, row) for record, row in zip(records, rows, strict=True)]


def replayed_records(
    traffic: RecordedTraffic,
    sections: Mapping[str, Any],
    *,
    machine: Machine | None = None,
    seed: int = 0,
    is_block: bool = False,
) -> list[SimulatedRecord]:
    """`replayed_results` with all times."""
    predictor = sections.get("admission", {}).get("length_predictor")
    learns = predictor == "max-tokens" if is_block else predictor in _WITHOUT_PROMPTS
    lengths = None if learns else LoggedForecasts(traffic.rows)
    machine = with_shares(traffic, machine or traffic.machine, sections)
    found = simulate(traffic.offered(seed), machine, sections, lengths=lengths)
    return found.records


def _result(record: SimulatedRecord, row: Row) -> RequestResult:
    end = record.finished if row["kind"] == "embed" else record.first_token
    return RequestResult(
        record.outcome.partition(":")[0], None if end is None else (end - record.arrival) / 1e6
    )


def groups_of(traffic: RecordedTraffic, is_judged: Callable[[Row], bool]) -> dict[Group, list[int]]:
    """The judged requests of each class and kind.

    Those whose client left or whose engine failed are served again, but nothing can be said of them.
    """
    found: dict[Group, list[int]] = {}
    for number, row in enumerate(traffic.rows):
        if row["outcome"] not in ("aborted", "failed") and is_judged(row):
            found.setdefault((row["class"], row["kind"]), []).append(number)
    return dict(sorted(found.items()))


def gains_of(
    before: Sequence[RequestResult], after: Sequence[RequestResult], numbers: Sequence[int]
) -> list[int]:
    """Of each of these requests 1 if only `after` meets its objectives, -1 if only `before` does, else 0."""
    return [(after[n].outcome == "met") - (before[n].outcome == "met") for n in numbers]


def summary_of(results: Sequence[RequestResult], numbers: Sequence[int]) -> Summary:
    """The summary of these requests, at least one."""
    chosen = [results[number] for number in numbers]
    times = [each.latency_ms for each in chosen if each.is_served and each.latency_ms is not None]
    p50, p90 = (float(value) for value in np.quantile(times, (0.5, 0.9))) if times else (None, None)
    return Summary(
        len(chosen),
        len(times),
        fmean(each.outcome == "met" for each in chosen),
        fmean(each.outcome in ("rejected", "evicted") for each in chosen),
        p50,
        p90,
    )
