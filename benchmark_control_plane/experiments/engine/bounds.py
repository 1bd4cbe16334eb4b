"""Bounds the rate that any engine policy could serve: a fluid bound, and a linear program with hindsight.

Neither runs an engine. The fluid bound serves only the requests with the least memory-time, in a pool that
is always full. The linear program knows all arrivals and lengths, but serves no request before it arrives:
it chooses the requests to serve, each from one of a few instants within its TTFT objective, without a
pause, in whole blocks of a pool that is checked once a second. Requests may be served in part, and requests
outside the window take no memory, so the program serves more than a schedule of these starts could. Other
starts and pauses are not considered. Steps take as long as those of a full pool, plus the time to prefill the
served prompts.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from time import perf_counter

from backends.cost_models.step_time import BATCH_TIMES, StepLoad
from backends.vllm.simulation.stepped_engine import SteppedEngineSetup
from benchmark_control_plane.experiments.engine.engine_replay import ReplayResult, ReplayWindow
from benchmark_control_plane.experiments.engine.offered_load import Lengths, Offer, TokenObjectives

# Parts of the TTFT objective after which a request may start; the first token takes one step more.
_STARTS = (0.0, 0.25, 0.5, 0.75, 0.95)
_CHECK_SECONDS = 1.0
# The step time depends on the prefill time of the served prompts: fixed-point iteration, to 2 %.
_ITERATIONS, _TOLERANCE = 8, 0.02
_MAX_PREFILL = 0.95


def full_step(lengths: Sequence[Lengths], setup: SteppedEngineSetup) -> tuple[float, float]:
    """Seconds of a step that decodes a full pool, and the number of requests in it."""
    resident = sum((p + o / 2) * o for p, o in lengths) / sum(o for _, o in lengths)
    pool = setup.blocks * setup.block_tokens
    full = StepLoad(decodes=round(pool / resident), cells=pool)
    return BATCH_TIMES[setup.batch_time](full), pool / resident


def prompt_token(setup: SteppedEngineSetup) -> float:
    """Seconds that one more prompt token adds to a step."""
    batch_time = BATCH_TIMES[setup.batch_time]
    return batch_time(StepLoad(prefill_tokens=2)) - batch_time(StepLoad(prefill_tokens=1))


def fluid_bound(lengths: Sequence[Lengths], setup: SteppedEngineSetup, served: float) -> float:
    """Requests per second if only the smallest `served` part by memory-time is served, without idle steps."""
    ordered = sorted(lengths, key=lambda lengths: (lengths[0] + lengths[1] / 2) * lengths[1])
    chosen = ordered[: int(served * len(ordered))]
    prompts = sum(p for p, _ in chosen) / len(ordered)
    outputs = sum(o for _, o in chosen) / len(ordered)
    step, decodes = full_step(chosen, setup)
    return 1 / (step * outputs / decodes + prompt_token(setup) * prompts)


def with_hindsight(
    setup: SteppedEngineSetup,
    offers: Iterator[Offer],
    window: ReplayWindow,
    objectives: TokenObjectives,
    rate: float,
) -> ReplayResult:
    """Result of the linear program; requests that it does not serve are rejected on arrival."""
    start_time = perf_counter()
    last = window.warm_up + window.requests
    wanted = list(islice(offers, window.warm_up, last))
    alone, _ = full_step([(offer.prompt, offer.output) for offer in wanted], setup)
    span = wanted[-1].at - wanted[0].at + alone * max(offer.output for offer in wanted)
    step, prefill = alone, prompt_token(setup) / span
    for _ in range(_ITERATIONS):
        share, prefill_share, held = _served(wanted, setup, objectives, step, prefill)
        if abs(alone / (1 - prefill_share) - step) <= _TOLERANCE * step:
            break
        step = (step + alone / (1 - prefill_share)) / 2
    return ReplayResult(
        rate=rate,
        published=share,
        strict=share,
        unfinished=1 - share,
        preemptions=0,
        longest_gap=0.0,
        met_gap=step,
        missed_wait=dict.fromkeys(("p50", "p95", "p100"), 0.0),
        held_share=held,
        met_share=held,
        steps=0,
        hook_us=0.0,
        seconds=perf_counter() - start_time,
        virtual_seconds=wanted[-1].at - wanted[0].at,
    )


def _served(
    wanted: Sequence[Offer],
    setup: SteppedEngineSetup,
    objectives: TokenObjectives,
    step: float,
    prefill: float,
) -> tuple[float, float, float]:
    """Shares of the requests that the program serves, of the time that prefill takes, and of the memory held.

    `prefill` is the share of the time that one prompt token takes. The memory counts while requests arrive.
    """
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix, vstack

    instants: list[int] = []
    columns: list[int] = []
    blocks: list[int] = []
    for column, (offer, part) in enumerate((offer, part) for offer in wanted for part in _STARTS):
        start = offer.at - wanted[0].at + part * objectives.ttft
        end = start + offer.output * step
        for check in range(math.ceil(start / _CHECK_SECONDS), math.floor(end / _CHECK_SECONDS) + 1):
            tokens = offer.prompt + (check * _CHECK_SECONDS - start) / step
            instants.append(check)
            columns.append(column)
            blocks.append(math.ceil(tokens / setup.block_tokens))
    choices = len(wanted) * len(_STARTS)
    checks = max(instants, default=0) + 1
    held = coo_matrix((blocks, (instants, columns)), shape=(checks, choices))
    once = coo_matrix(
        (np.ones(choices), (np.repeat(np.arange(len(wanted)), len(_STARTS)), np.arange(choices))),
        shape=(len(wanted), choices),
    )
    prefill_share = prefill * np.repeat([offer.prompt for offer in wanted], len(_STARTS))
    limits = np.concatenate([np.full(checks, setup.blocks), np.ones(len(wanted)), [_MAX_PREFILL]])
    found = linprog(
        -np.ones(choices),
        A_ub=vstack([held, once, prefill_share]).tocsr(),
        b_ub=limits,
        bounds=(0, 1),
        method="highs-ipm",
    )
    if not found.success:
        raise ArithmeticError(f"the linear program of {len(wanted)} requests has no optimum: {found.message}")
    arriving = math.floor((wanted[-1].at - wanted[0].at) / _CHECK_SECONDS) + 1
    share = float((held @ found.x)[:arriving].sum() / (setup.blocks * arriving))
    return float(-found.fun / len(wanted)), float(prefill_share @ found.x), share
