"""Draws the plan of a run: all requests with their times and lengths, before any is sent.

Each stream has its own random generator, seeded by the run's seed and the stream's name, so changing one
stream does not change the others. The same seed draws the same prompt and output lengths at every rate. Batch
sizes, passages, and queries that a trace lacks are drawn after the arrival times by the same generator, so
that they differ between rates.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.common.distributions import Lognormal
from benchmark_control_plane.judge.arrivals import bursts, times, wave
from benchmark_control_plane.judge.experiment_schema import (
    Arrivals,
    LengthsSection,
    SharedPrefixSection,
    StreamSection,
    TraceSection,
)
from benchmark_control_plane.judge.traces import NAMED, TraceColumns, TracedRequest, read_trace
from benchmark_control_plane.judge.workflow_stages import WorkflowStage
from controlplane.core.request import Kind

_PRESETS = {
    "short": Lognormal(mean=24, median=16, cap=64),
    "mid": Lognormal(mean=100, median=80, cap=256),
    "long": Lognormal(mean=320, median=280, cap=1_024),
}


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to send.

    Attributes:
        id: unique name.
        at: seconds from the start of the measured window, negative during warm-up.
        kind: generation or embedding.
        service_class: service class.
        tenant: tenant.
        prompt_tokens: prompt tokens, or all tokens of an embedding request.
        output_tokens: tokens to generate.
        max_tokens: limit that the client requests, if it differs from `output_tokens`.
        choices: answers to generate (`n`); more than one only on a simulated system.
        lengths: tokens of each embedding input.
        prefix_group: group of requests whose prompts begin with the same tokens.
        prefix_tokens: tokens that the prompt shares with its group.
        after: id of the request whose response must precede this one; `at` is then that request's.
        stage: place in a workflow with a deadline.
        e2e_ms: end-to-end objective that the request states; set when a stage is sent.
    """

    id: str
    at: float
    kind: Kind
    service_class: str
    tenant: str = "default"
    prompt_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int | None = None
    choices: int = 1
    lengths: tuple[int, ...] = ()
    after: str | None = None
    prefix_group: str = ""
    prefix_tokens: int = 0
    stage: WorkflowStage | None = None
    e2e_ms: float | None = None

    @property
    def is_warmup(self) -> bool:
        """Whether the request is sent before the measured window."""
        return self.at < 0


def plan_requests(
    streams: Mapping[str, StreamSection],
    *,
    rate: float,
    seed: int,
    warmup: float,
    measured: float,
    data: Path,
) -> list[PlannedRequest]:
    """Plan of all streams, in order of time, then of id.

    `rate` is in requests per second, where a retrieval counts as its two or three. Raises BadInput if a
    trace cannot be read.
    """
    # A retrieval is one arrival but several requests.
    weights = {name: s.share * len(s.stages) for name, s in streams.items()}
    total = sum(weights.values())
    found = [
        request
        for name, stream in streams.items()
        for request in _draw_stream(name, stream, rate * stream.share / total, seed, warmup, measured, data)
    ]
    return sorted(found, key=lambda request: (request.at, request.id))


def _draw_stream(
    name: str, stream: StreamSection, rate: float, seed: int, warmup: float, measured: float, data: Path
) -> Iterator[PlannedRequest]:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    # Groups have a generator of their own, so a shared prefix changes no time and no length.
    groups = np.random.default_rng([seed, zlib.crc32(name.encode()), 1])
    duration = warmup + measured
    for number, row in enumerate(_rows(stream, rng, rate, duration, data)):
        for request in _requests(f"{name}-{number}", stream, row, row.at - warmup, rng):
            yield _with_prefix(request, name, stream.shared_prefix, groups)


def _with_prefix(
    request: PlannedRequest, stream: str, shared: SharedPrefixSection | None, rng: np.random.Generator
) -> PlannedRequest:
    """With a drawn prefix; one that was recorded stays."""
    if shared is None or request.kind is Kind.EMBED:
        return request
    tokens = min(shared.tokens, request.prompt_tokens - 1)
    return replace(request, prefix_group=f"{stream}-{rng.integers(shared.groups)}", prefix_tokens=tokens)


def _rows(
    stream: StreamSection, rng: np.random.Generator, rate: float, duration: float, data: Path
) -> Iterator[TracedRequest]:
    """Rows of a stream; times in seconds from the start of the warm-up."""
    if stream.trace is not None and stream.arrivals is None:
        return _replay(stream.trace, rng, rate, duration, data)
    # Lengths have a generator of their own, so a higher rate draws more of them but not different ones.
    lengths = np.random.default_rng(rng.integers(2**63))
    at = _times(stream.arrivals or Arrivals(), rng, rate, duration)
    return (_draw_row(stream, time, lengths, data) for time in at)


def _times(arrivals: Arrivals, rng: np.random.Generator, rate: float, duration: float) -> list[float]:
    shape = None
    if arrivals.bursts is not None:
        shape = bursts(arrivals.bursts.on_s, arrivals.bursts.off_s)
    elif arrivals.wave is not None:
        shape = wave(arrivals.wave.period_s, arrivals.wave.amplitude)
    return times(rng, rate, duration, variation=arrivals.cv, shape=shape)


def _draw_row(stream: StreamSection, at: float, rng: np.random.Generator, data: Path) -> TracedRequest:
    if stream.trace is not None:
        rows = read_trace(*_source(stream.trace, data))
        row = rows[int(rng.integers(len(rows)))]
        return _capped(stream.trace, replace(row, at=at))
    prompt, output = draw(stream.prompt_tokens, rng), draw(stream.output_tokens, rng)
    query = None if stream.query_tokens is None else draw(stream.query_tokens, rng)
    return TracedRequest(at, prompt, output, query)


def _replay(
    trace: TraceSection, rng: np.random.Generator, rate: float, duration: float, data: Path
) -> Iterator[TracedRequest]:
    """Replays a trace cyclically from a random row, with time scaled so that its mean rate is `rate`."""
    rows = read_trace(*_source(trace, data))
    start = int(rng.integers(len(rows)))
    span = rows[-1].at + rows[-1].at / (len(rows) - 1)
    if not span:
        raise BadInput(f"{trace.file}: all rows have the same time; give the stream arrivals")
    scale = len(rows) / span / rate
    for step in range(1, 1_000 * len(rows)):
        rounds, index = divmod(start + step, len(rows))
        row = rows[index]
        at = (row.at + rounds * span - rows[start].at) * scale
        if at >= duration:
            return
        yield _capped(trace, replace(row, at=at))


def _capped(trace: TraceSection, row: TracedRequest) -> TracedRequest:
    prompt, output = min(trace.prompt_cap, row.prompt), min(trace.output_cap, row.output)
    return replace(row, prompt=prompt, output=output, prefix_tokens=min(row.prefix_tokens, prompt - 1))


def _source(trace: TraceSection, data: Path) -> tuple[Path, TraceColumns]:
    if trace.name is not None:
        file, columns = NAMED[trace.name]
        return data / file, columns
    assert trace.file is not None and trace.columns is not None
    # Joining an absolute path drops the data folder.
    return data / trace.file, trace.columns


def _requests(
    name: str, stream: StreamSection, row: TracedRequest, at: float, rng: np.random.Generator
) -> Iterator[PlannedRequest]:
    generate = PlannedRequest(
        name, at, Kind.GENERATE, stream.service_class, stream.tenant,
        prompt_tokens=row.prompt, output_tokens=row.output, max_tokens=stream.max_tokens,
        prefix_group=row.prefix, prefix_tokens=row.prefix_tokens,
    )  # fmt: skip
    if stream.kind == "generate":
        yield generate
    elif stream.kind == "embed":
        lengths = (row.prompt,) * draw(stream.batch, rng)
        yield PlannedRequest(
            name, at, Kind.EMBED, stream.service_class, stream.tenant, sum(lengths), lengths=lengths
        )
    else:
        yield from _retrieval(name, stream, row, generate, rng)


def _retrieval(
    name: str, stream: StreamSection, row: TracedRequest, answer: PlannedRequest, rng: np.random.Generator
) -> Iterator[PlannedRequest]:
    """The stages of a retrieval: each is sent when the response of the one before is complete."""
    query, last = row.query or draw(stream.query_tokens, rng), ""
    for stage in stream.stages[:-1]:
        count = 1 if stage == "query" else draw(stream.passages, rng)
        lengths = tuple(query if stage == "query" else draw(stream.passage_tokens, rng) for _ in range(count))
        request = PlannedRequest(
            f"{name}-{stage}", answer.at, Kind.EMBED, stream.embed_class or stream.service_class,
            stream.tenant, sum(lengths), lengths=lengths, after=last or None,
            stage=_stage(name, stage, stream),
        )  # fmt: skip
        yield request
        last = request.id
    yield replace(answer, id=f"{name}-~answer", after=last, stage=_stage(name, "answer", stream))


def _stage(workflow: str, name: str, stream: StreamSection) -> WorkflowStage | None:
    return None if stream.deadline_ms is None else WorkflowStage(workflow, name, stream.deadline_ms)


def draw(lengths: LengthsSection | None, rng: np.random.Generator) -> int:
    """Draws one token count; 1 if no distribution is given."""
    if lengths is None:
        return 1
    if lengths.fixed is not None:
        return lengths.fixed
    if lengths.between is not None:
        low, high = lengths.between
        return int(rng.integers(low, high + 1))
    if lengths.lognormal is not None:
        return Lognormal(*lengths.lognormal).draw(rng, 1)[0]
    return _PRESETS[lengths.preset or "mid"].draw(rng, 1)[0]
