"""The arithmetic of routing, as functions of numbers and arrays.

No function here calls another one, so that `numba.njit` compiles each as it stands: the cluster simulator
runs these functions and no copy of them.
"""

from typing import Protocol

REQUEST_TOKENS = 32
"""Prompt tokens whose work a request costs in addition to its prompt: it lengthens the decode steps."""


HOMES = 2
"""Boxes that are to have a named prefix in their cache."""

PREFIX_WORTH = 3.0
"""How much busier than another box a home may be before it is left, in times of computing the prefix.

A prefix that is computed once more takes time from all requests there, and memory from other prefixes.
"""


class RunningSums(Protocol):
    """A sequence of numbers, or an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int, /) -> float: ...


def predicted_ttft(
    intercept: float, sent_work: float, per_token: float, prompt_tokens: int, cached_tokens: int
) -> float:
    """Predicted TTFT in seconds.

    Args:
        intercept: forecast of the box for an empty prompt, from its report.
        sent_work: seconds of prefill that this router sent to the box since the report.
        per_token: seconds per prompt token.
        prompt_tokens: tokens of the prompt.
        cached_tokens: leading tokens that the box has in its prefix cache; the last token is always computed.
    """
    return intercept + sent_work + per_token * max(1, prompt_tokens - cached_tokens)


def drawn_box(cumulative: RunningSums, draw: float) -> int:
    """Index of a box, drawn with probability proportional to its weight.

    Args:
        cumulative: running sums of the weights, which are positive; at least one.
        draw: uniform in [0, 1).
    """
    target = draw * cumulative[len(cumulative) - 1]
    low, high = 0, len(cumulative) - 1
    while low < high:
        middle = (low + high) // 2
        if cumulative[middle] > target:
            high = middle
        else:
            low = middle + 1
    return low


def drawn_other(cumulative: RunningSums, first: int, draw: float) -> int:
    """Index of a box other than `first`, drawn as by `drawn_box`; `first` if there is no other."""
    last = len(cumulative) - 1
    if last == 0:
        return first
    before = cumulative[first - 1] if first > 0 else 0.0
    own = cumulative[first] - before
    target = draw * (cumulative[last] - own)
    if target >= before:
        target += own
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if cumulative[middle] > target:
            high = middle
        else:
            low = middle + 1
    if low == first:
        # Rounding put the target on the edge of the part that is left out.
        return first + 1 if first < last else first - 1
    return low


def is_better(
    age: float,
    missing_bytes: float,
    ttft: float,
    other_age: float,
    other_missing_bytes: float,
    other_ttft: float,
    useful_for: float,
) -> bool:
    """Whether a box is preferred to the other one, which was drawn first.

    Reports older than `useful_for` seconds say nothing, so the box drawn first stands, unless only its own
    report is that old. Then a box that misses no memory for the request is preferred, then the shorter
    predicted TTFT; the box drawn first wins a tie, so that equal boxes share the load.
    """
    if age > useful_for:
        return False
    if other_age > useful_for:
        return True
    if (missing_bytes > 0.0) != (other_missing_bytes > 0.0):
        return other_missing_bytes > 0.0
    return ttft < other_ttft


def may_retry(
    budget: float, age: float, ttft: float, objective: float, headroom: float, useful_for: float
) -> bool:
    """Whether a refused request may be sent to another box.

    Args:
        budget: retries that may be sent now.
        age: of the other box's report, in seconds.
        ttft: predicted TTFT at the other box.
        objective: TTFT objective of the request; infinite without one.
        headroom: part of the objective that the prediction must stay below.
        useful_for: seconds for which a report says anything; a box that is silent for longer may be dead.
    """
    # The budget is a sum of tenths.
    return budget >= 1.0 - 1e-9 and age <= useful_for and ttft < headroom * objective
