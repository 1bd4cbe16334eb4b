"""The least work that a request costs the simulated device in any schedule, and the window for it.

All figures are lower bounds, windows are at least as long as the true ones, so a program that allots this
work within these windows bounds every schedule of the device. A token after the first costs a decode, or the
recomputation of a preempted sequence, which with a prefix cache may be cheaper: of the tokens of a block at
least those after the last full block are computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np

from benchmark_control_plane.judge.records import SloTargets
from benchmark_control_plane.judge.simulated_target import BLOCK_TOKENS
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.request import Kind

# Virtual times are rounded to nanoseconds at each step.
_ROUNDING_SECONDS = 1e-6


@dataclass(frozen=True, slots=True)
class RequestWork:
    """Work of one request; times in seconds from the start of the measured window.

    Attributes:
        planned: the request.
        release: no work before.
        first_due: the first token is late after it; for an embedding as `due`.
        due: the response is late after it.
        first_within: objective of the first token; for an embedding as `within`.
        within: objective of the whole response.
        after_first: the tokens after the first are late so long after it.
        longest_gap: largest time between two tokens.
        prompt: prompt tokens to compute; 0 for an embedding.
        shared: leading blocks that other requests may hold, too.
        decodes: tokens after the first.
        block_steps: blocks held while they are produced, summed over the steps, without shared ones.
        fewest_blocks: blocks held at the first of these steps; `most_blocks` at the last.
        decode_seconds: time of the tokens after the first, without step bases and reading of KV cells.
        cheapest_decode: the least of these times.
        tokens: tokens to embed; 0 for a generation.
        pass_seconds: time of their passes without the bases.
        first_alone: time until the first token on an idle device; for an embedding as `alone`.
        alone: time of the whole request on an idle device.
        before: id of the request whose objective must be met before this one can be.
    """

    planned: PlannedRequest
    release: float = 0.0
    first_due: float = inf
    due: float = inf
    first_within: float = inf
    within: float = inf
    after_first: float = inf
    longest_gap: float = inf
    prompt: int = 0
    shared: int = 0
    decodes: int = 0
    block_steps: float = 0.0
    fewest_blocks: int = 0
    most_blocks: int = 0
    decode_seconds: float = 0.0
    cheapest_decode: float = 0.0
    tokens: int = 0
    pass_seconds: float = 0.0
    first_alone: float = 0.0
    alone: float = 0.0
    before: str | None = None

    @property
    def is_possible(self) -> bool:
        """Whether the objectives can be met on an otherwise idle device."""
        return (
            self.release + self.first_alone <= self.first_due
            and self.release + self.alone <= self.due
            and self.alone - self.first_alone <= self.after_first
        )


def least_works(
    requests: Sequence[PlannedRequest],
    device: SimulatedDeviceSection,
    objectives: Mapping[str, SloTargets],
    drain: float,
) -> list[RequestWork]:
    """Work of the requests within the measured window; a response is lost `drain` after the last arrival."""
    end = max((r.at for r in requests if r.after is None), default=0.0) + drain + _ROUNDING_SECONDS
    works: dict[str, RequestWork] = {}
    known = {r.id: r for r in requests}
    for request in requests:
        _add_work(works, known, request, device, objectives, end)
    return [works[r.id] for r in requests if not r.is_warmup]


def _add_work(
    works: dict[str, RequestWork],
    known: Mapping[str, PlannedRequest],
    request: PlannedRequest,
    device: SimulatedDeviceSection,
    objectives: Mapping[str, SloTargets],
    end: float,
) -> None:
    """Adds the work of a request, after that of the one it follows."""
    if request.id in works:
        return
    release = request.at
    if request.after is not None:
        _add_work(works, known, known[request.after], device, objectives, end)
        release = works[request.after].release + works[request.after].alone
    targets = objectives.get(request.service_class, SloTargets())
    if request.stage is not None:
        targets = SloTargets(e2e_ms=request.stage.deadline_ms)
    # Without a deadline of the workflow a later stage counts from the response before, whenever that comes.
    start = inf if request.after is not None and request.stage is None else request.at
    within = _seconds(targets.e2e_ms)
    first_within = min(within, _seconds(targets.ttft_ms))
    first_due, due = min(end, start + first_within), min(end, start + within)
    if request.kind is Kind.EMBED:
        work = _embedding(request, device)
        first_due, due, within = min(first_due, due), min(first_due, due), first_within
    else:
        work = _generation(request, device, targets)
        due = min(due, first_due + work.after_first)
    works[request.id] = replace(
        work, release=release, first_due=min(first_due, due), due=due, first_within=first_within,
        within=within, before=request.after if request.stage else None,
    )  # fmt: skip


def _seconds(milliseconds: float | None) -> float:
    return inf if milliseconds is None else milliseconds / 1e3 + _ROUNDING_SECONDS


def _embedding(request: PlannedRequest, device: SimulatedDeviceSection) -> RequestWork:
    base, per_token = device.embedding
    lengths = [min(length, device.embed_input_tokens) for length in request.lengths]
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    seconds = per_token * tokens + device.embedding_squares * squares
    alone = base * ceil(tokens / device.embed_batch_tokens) + seconds
    return RequestWork(request, tokens=tokens, pass_seconds=seconds, first_alone=alone, alone=alone)


def _generation(request: PlannedRequest, device: SimulatedDeviceSection, targets: SloTargets) -> RequestWork:
    base, per_prompt, per_decode, per_cell = device.step
    output = min(request.output_tokens, request.max_tokens or request.output_tokens)
    decodes, shared = max(0, output - 1), 0
    if device.prefix_cache:
        shared = min(request.prefix_tokens, request.prompt_tokens - 1) // BLOCK_TOKENS
    known = np.arange(request.prompt_tokens + 1, request.prompt_tokens + decodes + 1)
    blocks = -(-known // BLOCK_TOKENS)
    seconds = np.minimum(per_decode, per_prompt * ((known - 1) % BLOCK_TOKENS + 1))
    cells = per_cell * BLOCK_TOKENS * float((blocks - 1).sum())
    prompt = request.prompt_tokens - shared * BLOCK_TOKENS
    first_alone = base * ceil(prompt / device.step_tokens) + per_prompt * prompt
    # A pace is a mean over the tokens, a gap bounds each of them.
    pace = min(_seconds(targets.tpot_ms), _seconds(targets.gap_ms))
    return RequestWork(
        request,
        after_first=pace * decodes if decodes else inf,
        longest_gap=_seconds(targets.gap_ms),
        prompt=prompt,
        shared=shared,
        decodes=decodes,
        block_steps=float((blocks - shared).sum()),
        fewest_blocks=int(blocks[0]) - shared if decodes else 0,
        most_blocks=int(blocks[-1]) - shared if decodes else 0,
        decode_seconds=float(seconds.sum()),
        cheapest_decode=float(seconds.min()) if decodes else 0.0,
        first_alone=first_alone,
        alone=first_alone + base * decodes + float(seconds.sum()) + cells,
    )
