"""Chooses the running requests to clear when predictions were too low and the next batch does not fit.

`OverflowClearing` tracks the running requests in the order they joined, with the cells that they hold. A
`ClearingRule` chooses among them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmark_control_plane.round_model.policies.step_policy import Candidate, Draw, StepOptions

Holder = tuple[Candidate, int]
"""A running request, and the cells that clearing it frees in the next batch."""

ClearingRule = Callable[[Sequence[Holder], int], Sequence[Holder]]
"""(running requests as they joined, excess cells) -> requests to clear, freeing at least the excess."""


def clear_all(holders: Sequence[Holder], excess: int) -> Sequence[Holder]:
    """Clears all running requests, as MC-SF does."""
    return holders


def clear_latest(holders: Sequence[Holder], excess: int) -> Sequence[Holder]:
    """Clears the requests that joined last, as vLLM preempts."""
    chosen: list[Holder] = []
    for holder in reversed(holders):
        if excess <= 0:
            break
        chosen.append(holder)
        excess -= holder[1]
    return chosen


def clear_at_random(options: StepOptions) -> ClearingRule:
    """Builds a rule that clears each request with probability beta, repeatedly until the rest fits.

    Raises ValueError if beta is not in (0, 1] or there is no random source.
    """
    draw: Draw | None = options.draw
    if draw is None or not 0 < options.beta <= 1:
        raise ValueError(
            f"beta={options.beta}: clearing at random needs a probability above 0 and at most 1, and a seed"
        )
    source = draw

    def rule(holders: Sequence[Holder], excess: int) -> Sequence[Holder]:
        chosen: list[Holder] = []
        left = list(holders)
        while excess > 0:
            drawn = [source() < options.beta for _ in left]
            chosen += [holder for holder, is_out in zip(left, drawn, strict=True) if is_out]
            excess -= sum(holder[1] for holder, is_out in zip(left, drawn, strict=True) if is_out)
            left = [holder for holder, is_out in zip(left, drawn, strict=True) if not is_out]
        return chosen

    return rule


class OverflowClearing:
    """The running requests, and the rule that clears some of them.

    Cleared requests keep their prediction, as in the papers, except where that would repeat endlessly: in a
    second clearing with no arrival or completion in between, the predictions are raised to the steps already
    run plus one.
    """

    def __init__(self, rule: ClearingRule) -> None:
        self._rule = rule
        self._started: dict[int, tuple[Candidate, int]] = {}
        self._offset = 0
        self._is_repeating = False

    def __len__(self) -> int:
        return len(self._started)

    def arrived(self) -> None:
        self._is_repeating = False

    def joined(self, candidate: Candidate, step: int) -> None:
        self._started[candidate.id] = (candidate, step)
        self._offset += candidate.prompt - step

    def finished(self, candidate: Candidate) -> None:
        self._is_repeating = False
        self._leave(candidate)

    def cells_after(self, step: int) -> int:
        """Cells used after the batch of `step` if no request joins."""
        return self._offset + len(self._started) * (step + 1)

    def cleared(self, step: int, excess: int) -> list[Candidate]:
        """Removes the requests that the rule chooses and returns them, with predictions raised if needed."""
        holders = [(c, c.prompt + step + 1 - started) for c, started in self._started.values()]
        chosen = [candidate for candidate, _ in self._rule(holders, excess)]
        steps_run = [step - self._leave(candidate) for candidate in chosen]
        if self._is_repeating:
            chosen = [
                c if c.predicted > steps else replace(c, predicted=steps + 1)
                for c, steps in zip(chosen, steps_run, strict=True)
            ]
        self._is_repeating = True
        return chosen

    def _leave(self, candidate: Candidate) -> int:
        """Removes the request and returns the step in which it started."""
        _, started = self._started.pop(candidate.id)
        self._offset -= candidate.prompt - started
        return started
