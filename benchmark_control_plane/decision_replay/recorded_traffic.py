"""Turns a decision log into requests, device and configuration of a simulation.

Requests of one run under one configuration are used: the longest such part of the log. The output length of a
request that was not served to its end is drawn from its forecast. A client that left does so again as long
after its arrival, whatever the request has got by then: patience is the client's, in time.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.decision_replay.recorded_device import (
    DeviceCosts,
    logged_costs,
    logged_machine,
    logged_sharing,
)
from benchmark_control_plane.decision_replay.sound_rows import MOST_TOKENS, is_sound
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import Offered, SimulatedEmbedding, SimulatedRequest
from controlplane.core.forecast import LengthForecast
from controlplane.core.request import Request
from controlplane.service.decision_log.log_rows import FORECAST_LEVELS, Row
from controlplane.service.decision_log.reader import read_log

LEAST_REQUESTS = 40
_SERVED = ("met", "late")
# Rejections that no policy decides.
_NOT_REPLAYED = ("engine_down", "shutting_down")
# Token ids of the rest of each prompt, which no other prompt has.
_OWN_TOKENS = 1 << 50


@dataclass(frozen=True, slots=True)
class RecordedTraffic:
    """The replayable part of a log.

    Attributes:
        rows: the rows of the requests, in order of arrival.
        machine: the device, with costs from the first half.
        costs: these costs.
        sections: of the configuration in force those that are replayed, as in a YAML file.
        left_out: what of the log is not replayed, and what is approximated.
        config: the `config` row of the log.
        host_delays: seconds that a request of each kind takes after its step in the engine.
        step_factor: by what `costs` of a step exceed those that the server had learned.
    """

    rows: Sequence[Row]
    machine: Machine
    costs: DeviceCosts
    sections: Mapping[str, Any]
    left_out: Sequence[str]
    config: Row
    host_delays: Mapping[str, float] = field(default_factory=dict)
    step_factor: float = 1.0

    @property
    def middle(self) -> int:
        """The time that halves the log, in microseconds."""
        return int(self.rows[0]["at"] + self.rows[-1]["at"]) // 2

    @property
    def first_half(self) -> Sequence[Row]:
        """The rows before `middle`."""
        return self.rows[: bisect_left(self.rows, self.middle, key=itemgetter("at"))]

    @property
    def imputed(self) -> list[bool]:
        """Whether the output length of each request is drawn from its forecast."""
        return [row["kind"] == "generate" and row["outcome"] not in _SERVED for row in self.rows]

    def offered(self, seed: int, *, most: int | None = None) -> list[Offered]:
        """The first `most` requests for a simulation, or all; `seed` decides the lengths that are drawn."""
        start, block = self.rows[0]["at"], self.machine.geometry.block_tokens
        return [
            replace(
                _offer(row, number, start, block, seed),
                host_delay=_intake_seconds(row) + self.host_delays.get(row["kind"], 0.0),
            )
            for number, row in enumerate(islice(self.rows, most))
        ]

    def slower(self, factor: float) -> Machine:
        """The machine with all times multiplied by `factor`."""
        return replace(self.machine, batch_time=self.costs.batch_time(slower=factor))

    def with_times(self, *, steps: float, passes: float, step_slowdown: float) -> "RecordedTraffic":
        """The traffic on a machine whose steps and passes take so many times as long.

        Steps take `step_slowdown` times as long during passes.
        """
        costs = self.costs.slower(steps=steps, passes=passes)
        machine = replace(
            self.machine,
            batch_time=costs.batch_time(),
            step_slowdown=step_slowdown,
            pass_slowdown=costs.pass_slowdown,
        )
        return replace(self, machine=machine, costs=costs, step_factor=steps * self.step_factor)


class LoggedForecasts:
    """The length predictor that gives each request the forecast that it had; nothing is learned."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def forecast(self, request: Request) -> LengthForecast:
        """The forecast in the log; of a request without one, every length up to its limit."""
        return _forecast_of(self._rows[int(request.id.partition("-")[0])])

    def observe(self, request: Request, output_tokens: int) -> None:
        """Does nothing."""

    def withdraw(self, request: Request) -> None:
        """Does nothing."""


def read_traffic(path: Path) -> RecordedTraffic:
    """Reads a log. Raises BadInput if too little of it can be replayed, and OSError."""
    log = read_log(path)
    left_out = list(log.left_out)
    if not log.configs or not log.requests:
        raise BadInput("\n".join([f"{path}: no requests and configuration of a decision log", *left_out]))
    parts = _parts(log.requests, log.configs)
    run, version = _longest_part(parts, log.configs)
    config = next(row for row in log.configs if (row["run"], row["version"]) == (run, version))
    kept: list[tuple[int, int, int]] = []
    unsound = others = 0
    for number, (row, of) in enumerate(zip(log.requests, parts, strict=True)):
        if of != (run, version):
            others += 1
        elif not is_sound(row):
            unsound += 1
        elif not _is_decided_by_policy(row):
            others += 1
        else:
            kept.append((row["at"], int(row["id"].rpartition("-")[2]), number))
    if unsound:
        left_out.append(f"{unsound:,} requests with sizes or objectives that no request can have")
    if others:
        left_out.append(
            f"{others:,} requests: of other runs or configurations than run {run}, version {version}, or "
            "rejected because an engine was down or the server shut down"
        )
    if len(kept) < LEAST_REQUESTS:
        raise BadInput(
            "\n".join(
                [f"{path}: {len(kept)} requests can be replayed and {LEAST_REQUESTS} are needed", *left_out]
            )
        )
    rows = log.requests.chosen(number for _, _, number in sorted(kept))
    steps = [row for row in log.steps if row["run"] == run]
    try:
        sharing = logged_sharing(config, left_out)
        costs, embedder = logged_costs(steps, rows, config["machine"], sharing, left_out)
        machine = logged_machine(config["machine"], embedder, costs, sharing, steps)
        sections = served_sections(config["config"], config["machine"])
    except (KeyError, TypeError, AttributeError) as error:
        message = f"{path}: a `config` or `steps` row lacks a field, or has one of a wrong type: {error!r}"
        raise BadInput(message) from error
    return RecordedTraffic(rows, machine, costs, sections, left_out, config=config)


def _is_decided_by_policy(row: Row) -> bool:
    last = row["decisions"][-1] if row["decisions"] else {}
    return last.get("reason") not in _NOT_REPLAYED


def served_sections(config: Mapping[str, Any], machine: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a configuration that decide how requests are served on this machine."""
    kept = {"classes", "tenants", "admission", "scheduling"}
    if machine["generators"] and machine["embedders"]:
        kept.add("quota")
    return {name: section for name, section in config.items() if name in kept}


def _longest_part(parts: Sequence[tuple[str, int]], configs: Sequence[Row]) -> tuple[str, int]:
    counts = Counter(parts)
    known = {(row["run"], row["version"]) for row in configs}
    (found, _), *_ = sorted(
        ((part, count) for part, count in counts.items() if part in known),
        key=lambda each: (-each[1], each[0]),
    ) or [(next(iter(known)), 0)]
    return found


def _parts(requests: Sequence[Row], configs: Sequence[Row]) -> list[tuple[str, int]]:
    """The run of each request, and the version of the configuration in force when it arrived."""
    begun: dict[str, list[tuple[int, tuple[str, int]]]] = {}
    for each in sorted(configs, key=lambda row: (row["at"], row["version"])):
        begun.setdefault(each["run"], []).append((each["at"], (each["run"], each["version"])))
    found = []
    for row in requests:
        known = begun.get(row["run"], [])
        at = bisect_right(known, row["at"], key=itemgetter(0))
        found.append(known[at - 1][1] if at else (row["run"], 0))
    return found


def _intake_seconds(row: Row) -> float:
    """The time from arrival to the gate: of the protocol, of tokenization and of a late event loop."""
    return row["decisions"][0]["at_ms"] / 1e3 if row["decisions"] else 0.0


def _offer(row: Row, number: int, start: int, block_tokens: int, seed: int) -> Offered:
    at, objectives = (row["at"] - start) / 1e6, {f"{k}_ms": v for k, v in row.get("slo_ms", {}).items()}
    tenant, name = row["tenant"], row["class"]
    leaves = row["e2e_ms"] / 1e3 if row["outcome"] == "aborted" and row.get("e2e_ms") is not None else None
    if row["kind"] == "embed":
        lengths = tuple(expanded(row["input_tokens"], row["sequences"]))
        return SimulatedEmbedding(
            at, lengths, name, tenant=tenant, objectives=objectives, leaves_after=leaves
        )
    limit = row["max_output_tokens"]
    output = row.get("output_tokens", 0)
    if row["outcome"] not in _SERVED:
        # More than it has, for it would have ended.
        left = _forecast_of(row).remaining(after=output).quantile(Random(f"{seed} {row['id']}").random())
        output += max(1, round(left))
    return SimulatedRequest(
        at,
        row["prompt_tokens"],
        min(max(1, output), limit),
        limit,
        name,
        # Of a whole day they would be gigabytes.
        prompt=partial(_token_ids, row.get("blocks", ()), row["prompt_tokens"], number, block_tokens),
        sequences=row["sequences"],
        tenant=tenant,
        objectives=objectives,
        leaves_after=leaves,
    )


def expanded(lengths: Sequence[int], count: int) -> list[int]:
    """`count` lengths whose order statistics are the given ones."""
    if count <= len(lengths):
        return list(lengths)
    last = len(lengths) - 1
    return [lengths[round(at * last / (count - 1))] for at in range(count)]


def _token_ids(
    blocks: Sequence[Sequence[int]], prompt_tokens: int, number: int, block_tokens: int
) -> "array[int]":
    """Token ids that are equal exactly where the log's blocks are."""
    ids = array("q")
    for first, count in blocks:
        ids.extend(range(first * block_tokens, (first + count) * block_tokens))
    own = _OWN_TOKENS + number * MOST_TOKENS
    ids.extend(range(own, own + max(0, prompt_tokens - len(ids))))
    return ids


def _forecast_of(row: Row) -> LengthForecast:
    if (tokens := row.get("forecast")) is not None:
        return LengthForecast(FORECAST_LEVELS, tuple(map(float, tokens)))
    return LengthForecast((0.0, 1.0), (1.0, float(row["max_output_tokens"])))
