"""How much could any policy carry? Two answers that no engine needs to run for.

The fluid bound serves only the requests that take the least memory-time, in a pool that is always full.
With hindsight all arrivals and lengths are known beforehand, but arrivals still come when they come: a
linear program chooses whom to serve, each from one of a few instants within its promised TTFT on, without
a pause, in whole blocks of a pool that is looked at once a second. Requests may be served in parts, and
nobody outside the window takes any memory, so it serves more than a schedule could. Steps take as long as
those of a full pool, and longer by the time that goes into the prompts of those that are served.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from time import perf_counter

from backends.cost_models.step_time import BATCH_TIMES, StepLoad
from backends.vllm.simulation.stepped_engine import Setup
from benchmark_control_plane.experiments.engine.replay import ReplayResult, ReplayWindow
from benchmark_control_plane.experiments.engine.workload import Lengths, Offer, TokenObjectives

# Parts of the promised TTFT after which a request may start; the first token takes a step more.
_STARTS = (0.0, 0.25, 0.5, 0.75, 0.95)
_LOOK_SECONDS = 1.0
# The time that prompts take is found by trying; good to 2 %.
_TRIES, _CLOSE = 8, 0.02
_MOST_READING = 0.95


def full_step(lengths: Sequence[Lengths], setup: Setup) -> tuple[float, float]:
    """Seconds of a step that decodes a full pool, and how many requests that is."""
    resident = sum((p + o / 2) * o for p, o in lengths) / sum(o for _, o in lengths)
    pool = setup.blocks * setup.block_tokens
    full = StepLoad(decodes=round(pool / resident), cells=pool)
    return BATCH_TIMES[setup.batch_time](full), pool / resident


def prompt_token(setup: Setup) -> float:
    """Seconds that one more token of a prompt adds to a step."""
    batch_time = BATCH_TIMES[setup.batch_time]
    return batch_time(StepLoad(prefill_tokens=2)) - batch_time(StepLoad(prefill_tokens=1))


def fluid_bound(lengths: Sequence[Lengths], setup: Setup, served: float) -> float:
    """Requests a second if only the smallest `served` part by memory-time were served, in steps that never
    wait."""
    ordered = sorted(lengths, key=lambda one: (one[0] + one[1] / 2) * one[1])
    kept = ordered[: int(served * len(ordered))]
    prompts = sum(p for p, _ in kept) / len(ordered)
    outputs = sum(o for _, o in kept) / len(ordered)
    step, decodes = full_step(kept, setup)
    return 1 / (step * outputs / decodes + prompt_token(setup) * prompts)


def with_hindsight(
    setup: Setup, offers: Iterator[Offer], window: ReplayWindow, promise: TokenObjectives, rate: float
) -> ReplayResult:
    """Whom it does not serve it turns away on arrival, so nobody pauses and nobody waits in vain."""
    began = perf_counter()
    last = window.warm_up + window.requests
    wanted = list(islice(offers, window.warm_up, last))
    alone, _ = full_step([(one.prompt, one.output) for one in wanted], setup)
    lasts = wanted[-1].at - wanted[0].at + alone * max(one.output for one in wanted)
    step, reads = alone, prompt_token(setup) / lasts
    for _ in range(_TRIES):
        share, reading, held = _served(wanted, setup, promise, step, reads)
        if abs(alone / (1 - reading) - step) <= _CLOSE * step:
            break
        step = (step + alone / (1 - reading)) / 2
    return ReplayResult(
        rate=rate,
        published=share,
        strict=share,
        unfinished=1 - share,
        preemptions=0,
        longest_gap=0.0,
        kept_gap=step,
        lost_wait=dict.fromkeys(("p50", "p95", "p100"), 0.0),
        held_share=held,
        kept_share=held,
        steps=0,
        hook_us=0.0,
        seconds=perf_counter() - began,
        virtual_seconds=wanted[-1].at - wanted[0].at,
    )


def _served(
    wanted: Sequence[Offer], setup: Setup, promise: TokenObjectives, step: float, reads: float
) -> tuple[float, float, float]:
    """The part of the requests that the linear program serves, the part of the time that reading their
    prompts takes (`reads` for each token), and the part of the memory that they hold while others arrive."""
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix, vstack

    instants: list[int] = []
    columns: list[int] = []
    blocks: list[int] = []
    for column, (offer, part) in enumerate((offer, part) for offer in wanted for part in _STARTS):
        start = offer.at - wanted[0].at + part * promise.ttft
        end = start + offer.output * step
        for look in range(math.ceil(start / _LOOK_SECONDS), math.floor(end / _LOOK_SECONDS) + 1):
            tokens = offer.prompt + (look * _LOOK_SECONDS - start) / step
            instants.append(look)
            columns.append(column)
            blocks.append(math.ceil(tokens / setup.block_tokens))
    choices = len(wanted) * len(_STARTS)
    looks = max(instants, default=0) + 1
    held = coo_matrix((blocks, (instants, columns)), shape=(looks, choices))
    once = coo_matrix(
        (np.ones(choices), (np.repeat(np.arange(len(wanted)), len(_STARTS)), np.arange(choices))),
        shape=(len(wanted), choices),
    )
    reading = reads * np.repeat([one.prompt for one in wanted], len(_STARTS))
    limits = np.concatenate([np.full(looks, setup.blocks), np.ones(len(wanted)), [_MOST_READING]])
    found = linprog(
        -np.ones(choices),
        A_ub=vstack([held, once, reading]).tocsr(),
        b_ub=limits,
        bounds=(0, 1),
        method="highs-ipm",
    )
    if not found.success:
        raise ArithmeticError(f"no optimum of the {len(wanted)} requests was found: {found.message}")
    arriving = math.floor((wanted[-1].at - wanted[0].at) / _LOOK_SECONDS) + 1
    share = float((held @ found.x)[:arriving].sum() / (setup.blocks * arriving))
    return float(-found.fun / len(wanted)), float(reading @ found.x), share
