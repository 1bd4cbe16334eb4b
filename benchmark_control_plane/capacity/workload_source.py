"""The workload of `tandem capacity` and `fleet plan`: streams of a file, or a decision log at other rates."""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from benchmark_control_plane.capacity.device_model import StepLine
from benchmark_control_plane.capacity.search import WARM_UP_SHARE, Plan
from benchmark_control_plane.common.command_line import BadInput, data_folder_option
from benchmark_control_plane.decision_replay.recorded_traffic import (
    RecordedTraffic,
    expanded,
    read_traffic,
)
from benchmark_control_plane.judge.experiment_schema import StreamSection, WorkloadSection
from benchmark_control_plane.judge.workload import PlannedRequest, plan_requests
from benchmark_control_plane.simulator.simulation import SimulatedEmbedding
from controlplane.config import Config, ConfigError
from controlplane.config.loader import parse_as, read_yaml
from controlplane.core.request import Kind
from controlplane.service.decision_log.segment_files import COMPRESSED, PLAIN

_BUSIEST_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class OfferedWorkload:
    """A workload that can be offered at any rate.

    Attributes:
        plan: the requests at a rate.
        assumptions: one sentence for each.
        step: measured seconds of a step, and more per prompt token, decode and cell; None if not known.
        embedding: measured seconds of a pass, and more per token; None if not known.
        most: requests that there are; None for any number.
        rate: requests per second in the busiest five minutes of a log; None for streams.
    """

    plan: Plan
    assumptions: Sequence[str] = ()
    step: StepLine | None = None
    embedding: tuple[float, float] | None = None
    most: int | None = None
    rate: float | None = None


def workload_of(options: argparse.Namespace, configs: Sequence[Config]) -> OfferedWorkload:
    """The workload that `--workload` names, which boxes of these configurations serve together.

    The configurations have the same classes. Raises BadInput, ConfigError or OSError.
    """
    path = Path(options.workload)
    if not options.workload.lstrip().startswith("{") and (
        path.is_dir() or path.name.endswith((PLAIN, COMPRESSED))
    ):
        return logged_workload(path, configs, requests=options.requests, seed=options.seed)
    streams, data = read_workload(options.workload), data_folder_option(options.data)
    _check_workload(configs, streams)

    def plan(rate: float, warmup: float, measured: float) -> list[PlannedRequest]:
        return plan_requests(
            streams, rate=rate, seed=options.seed, warmup=warmup, measured=measured, data=data
        )

    return OfferedWorkload(plan)


def read_workload(given: str) -> Mapping[str, StreamSection]:
    """Streams of a file, or of YAML in braces. Raises ConfigError."""
    if not given.lstrip().startswith("{"):
        return parse_as(WorkloadSection, read_yaml(Path(given)), source=given).streams
    try:
        content = yaml.safe_load(given)
    except yaml.YAMLError as error:
        raise ConfigError(f"--workload: not YAML: {error}") from error
    return parse_as(WorkloadSection, {"streams": content}, source="--workload").streams


def logged_workload(
    path: Path, configs: Sequence[Config], *, requests: int, seed: int = 0
) -> OfferedWorkload:
    """The requests of a log in their order, with times stretched to the rate. Raises BadInput or OSError."""
    traffic = read_traffic(path)
    needed = int((1 + WARM_UP_SHARE) * requests) + 1
    if needed > len(traffic.rows):
        raise BadInput(
            f"{path}: {len(traffic.rows):,} requests can be replayed, and --requests={requests} needs "
            f"{needed:,}; lower it"
        )
    counts = Counter(row["class"] for row in traffic.rows)
    if unknown := sorted(set(counts) - set(configs[0].classes)):
        raise BadInput(f"{path}: the log has requests of {', '.join(unknown)}; add the class")
    kinds = {row["kind"] for row in traffic.rows}
    if "embed" in kinds and not any(config.models.embeddings for config in configs):
        raise BadInput(f"{path}: the log has embedding requests; add models.embeddings")
    if "generate" in kinds and all(config.models.chat is None for config in configs):
        raise BadInput(f"{path}: the log has generations; add models.chat")
    base, decode, cell, prompt_token = traffic.costs.step
    start, token, square = traffic.costs.embedding
    token += square * _mean_length(traffic)
    return OfferedWorkload(
        partial(_planned, traffic, seed),
        [
            "Traffic is that of the log, at other rates with its times stretched; the output lengths of "
            "requests that were not served are drawn from their forecasts, and requests whose client left "
            "end with the tokens that it got. Objectives are those of the classes, also for requests that "
            "stated others, and no tenant has limits.",
            *(f"Left out of the log: {line}." for line in traffic.left_out),
        ],
        step=(base, prompt_token, decode, cell) if base else None,
        embedding=(start, token) if start or token else None,
        most=len(traffic.rows),
        rate=busiest_rate([row["at"] / 1e6 for row in traffic.rows], _BUSIEST_SECONDS),
    )


def _mean_length(traffic: RecordedTraffic) -> float:
    """The length of the input that a token is in, on average over the tokens to embed; 0 without any."""
    lengths = [
        length
        for row in traffic.rows
        if row["kind"] == "embed"
        for length in expanded(row["input_tokens"], row["sequences"])
    ]
    return sum(length * length for length in lengths) / sum(lengths) if lengths else 0.0


def busiest_rate(times: Sequence[float], window: float) -> float:
    """The highest rate of sorted times in `window` seconds, or over all of them if they span less."""
    span = min(window, times[-1] - times[0])
    first = most = 0
    for last, at in enumerate(times):
        while at - times[first] > span:
            first += 1
        most = max(most, last - first)
    # Between n + 1 times are n intervals.
    return most / max(span, 1e-6)


def _planned(
    traffic: RecordedTraffic, seed: int, rate: float, warmup: float, measured: float
) -> Sequence[PlannedRequest]:
    """The first requests of the log, as many as there are at `rate` in so many seconds."""
    count = min(len(traffic.rows), round(rate * (warmup + measured)))
    offers = traffic.offered(seed=seed, most=count)
    stretch = (warmup + measured) / max(1e-9, offers[-1].at)
    found = []
    for number, (row, offer) in enumerate(zip(traffic.rows, offers, strict=False)):
        at, name = stretch * offer.at - warmup, row["class"]
        if isinstance(offer, SimulatedEmbedding):
            tokens = sum(offer.lengths)
            request = PlannedRequest(
                f"log-{number}", at, Kind.EMBED, name, prompt_tokens=tokens, lengths=offer.lengths
            )
        else:
            request = PlannedRequest(
                f"log-{number}",
                at,
                Kind.GENERATE,
                name,
                prompt_tokens=offer.prompt_tokens,
                output_tokens=offer.output_tokens
                if offer.leaves_after is None
                else max(1, row.get("output_tokens") or 0),
                max_tokens=offer.max_tokens,
                choices=offer.sequences,
                prefix_group=f"{row['blocks'][0][0]}" if row.get("blocks") else "",
                prefix_tokens=min(row.get("cached_tokens") or 0, offer.prompt_tokens - 1),
            )
        found.append(request)
    return found


def _check_workload(configs: Sequence[Config], streams: Mapping[str, StreamSection]) -> None:
    """Raises BadInput if the configurations do not serve the workload."""
    classes = configs[0].classes
    for name, stream in streams.items():
        for used in (stream.service_class, stream.embed_class):
            if used is not None and used not in classes:
                raise BadInput(
                    f"streams.{name}: class {used!r} is not in the configuration's classes "
                    f"({', '.join(sorted(classes))}); change the stream or add the class"
                )
        if stream.kind != "generate" and not any(config.models.embeddings for config in configs):
            raise BadInput(f"streams.{name}: kind: {stream.kind} needs models.embeddings; add one")
        if stream.kind != "embed" and all(config.models.chat is None for config in configs):
            raise BadInput(f"streams.{name}: kind: {stream.kind} needs models.chat; add it")
