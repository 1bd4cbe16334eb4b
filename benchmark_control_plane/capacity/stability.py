"""Stability of batch service under a KV-memory constraint: the rate above which queues grow without bound.

After Nie, Si and Zhou, "A Queueing-Theoretic Framework for Stability Analysis of LLM Inference with KV
Cache Memory Constraints" (arXiv:2605.04595, 2026): a request of prompt s and output o holds cells step by
step, g(s, o) in total over its life. A cache of M cells that is always full lets M / E[g] requests pass per
step, so with steps of b seconds the service rate is M / (b E[g]). The service is overloaded above it, and
stable below it less a slack: the cells of the largest request, which may find no place although as many are
free.

Added here: two more limits of a step (its requests and its tokens), a step time that depends on the step, and
embedding passes that take turns with the steps. Not counted: blocks that requests share, memory that moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.request import Kind

# A limit of the step binds if twice as much of it raises the rate by this part; otherwise the time does.
_GAIN = 0.1


@dataclass(frozen=True, slots=True)
class MeanDemand:
    """Means over the generations of a workload; each choice (`n`) is a sequence with a prompt of its own.

    Attributes:
        prompt: prompt tokens to compute.
        decodes: decode steps of all sequences.
        cells: KV cells held, summed over the steps of a request.
        steps: steps of all sequences.
        largest: cells that the largest request holds at its end.
    """

    prompt: float
    decodes: float
    cells: float
    steps: float
    largest: int


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The cells of the KV cache, and the requests and tokens of one step."""

    cells: float
    requests: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Stability:
    """Rates in requests per second of the whole mix.

    Attributes:
        overloaded_above: queues grow without bound above this rate.
        stable_below: queues stay bounded below this rate.
        attainable_below: no policy attains the target in each class above this rate, also if it serves only
            the smallest requests of each class.
        binding: what limits the rate: memory, requests or tokens of a step, or time.
        doubled: the first rate if the limit of the step that is reached first were twice as large.
        step_seconds: duration of a full step.
        embedding_share: share of the device's time that embeddings take at the limit.
    """

    overloaded_above: float
    stable_below: float
    attainable_below: float
    binding: str
    doubled: float
    step_seconds: float
    embedding_share: float


def mean_demand(requests: Sequence[PlannedRequest], *, chunk: int, block: int) -> MeanDemand | None:
    """Means over the generations; prompts are computed in chunks. None without generations."""
    generations = [r for r in requests if r.kind is Kind.GENERATE]
    if not generations:
        return None
    prompt = decodes = cells = steps = 0.0
    for request in generations:
        s, o, n = request.prompt_tokens, request.output_tokens, request.choices
        chunks = ceil(s / chunk)
        count = chunks + o - 1
        prompt += n * s
        decodes += n * (o - 1)
        steps += n * count
        # The last block of a sequence is half full on average.
        cells += n * (chunk * chunks * (chunks - 1) / 2 + s + (o - 1) * s + o * (o - 1) / 2)
        cells += n * count * (block - 1) / 2
    largest = max(r.choices * ceil((r.prompt_tokens + r.output_tokens) / block) * block for r in generations)
    count = len(generations)
    return MeanDemand(prompt / count, decodes / count, cells / count, steps / count, largest)


def embedding_seconds(requests: Sequence[PlannedRequest], device: SimulatedDeviceSection) -> float:
    """Mean device time of an embedding request in full batches; 0 without embeddings."""
    tokens = [sum(r.lengths) for r in requests if r.kind is Kind.EMBED]
    base, per_token = device.embedding
    return sum(tokens) / len(tokens) * (per_token + base / device.embed_batch_tokens) if tokens else 0.0


def stability(
    requests: Sequence[PlannedRequest], device: SimulatedDeviceSection, *, block: int, target: float
) -> Stability:
    """The condition for a sample of the workload, and for the smallest `target` share of each class.

    Raises ValueError if the sample is empty.
    """
    if not requests:
        raise ValueError("the workload has no request; raise the shares of its streams")
    smallest = _smallest(requests, target)
    served = _condition(smallest, device, block=block).overloaded_above
    return replace(
        _condition(requests, device, block=block), attainable_below=served * len(requests) / len(smallest)
    )


def _smallest(requests: Sequence[PlannedRequest], share: float) -> list[PlannedRequest]:
    """The part of each class, at least one request, that takes the least memory over time."""
    kept = []
    for group in {(r.service_class, r.kind): None for r in requests}:
        same = [r for r in requests if (r.service_class, r.kind) == group]
        same.sort(
            key=lambda r: (
                r.choices * (r.prompt_tokens + r.output_tokens / 2) * max(1, r.output_tokens), r.id
            )
        )  # fmt: skip
        kept += same[: max(1, ceil(share * len(same)))]
    return kept


def _condition(
    requests: Sequence[PlannedRequest], device: SimulatedDeviceSection, *, block: int
) -> Stability:
    generations = sum(r.kind is Kind.GENERATE for r in requests) / len(requests)
    embedding = (1 - generations) * embedding_seconds(requests, device)
    demand = mean_demand(requests, chunk=device.step_tokens, block=block)
    if demand is None:
        alone = 1 / embedding
        return Stability(alone, alone, alone, "time", alone, 0.0, 1.0)
    cells = inf if device.kv_memory is None else device.kv_memory / device.kv_bytes_per_token
    limits = StepLimits(cells, device.max_running, device.step_tokens)

    def rate(at: StepLimits) -> float:
        passing = min(_passing(demand, at).values())
        return 1 / (generations * _step(demand, passing, device.step) / passing + embedding)

    name, passing = min(_passing(demand, limits).items(), key=lambda item: item[1])
    above, doubled = rate(limits), rate(_doubled(limits, name))
    slack = max(limits.cells - demand.largest, 0.0)
    return Stability(
        overloaded_above=above,
        stable_below=rate(replace(limits, cells=slack)) if slack else 0.0,
        attainable_below=above,
        binding=name if doubled >= (1 + _GAIN) * above else "time",
        doubled=doubled,
        step_seconds=_step(demand, passing, device.step),
        embedding_share=above * embedding,
    )


def _passing(demand: MeanDemand, limits: StepLimits) -> dict[str, float]:
    """Requests that may pass per step under each limit."""
    return {
        "memory": limits.cells / demand.cells,
        "requests of a step": limits.requests / demand.steps,
        "tokens of a step": limits.tokens / (demand.prompt + demand.decodes),
    }


def _doubled(limits: StepLimits, name: str) -> StepLimits:
    return StepLimits(
        limits.cells * (2 if name == "memory" else 1),
        limits.requests * (2 if name == "requests of a step" else 1),
        limits.tokens * (2 if name == "tokens of a step" else 1),
    )


def _step(demand: MeanDemand, passing: float, line: tuple[float, float, float, float]) -> float:
    """Seconds of a step that `passing` requests pass per step, spread over their lives."""
    base, prompt_token, decode, cell = line
    work = demand.prompt * prompt_token + demand.decodes * decode + demand.cells * cell
    return base + passing * work
