"""Predictions were too low and the next batch would not fit: who gives back all cells and starts again?

`OverflowClearing` knows who runs, in the order they joined, with what they hold. The rule picks among them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmark_control_plane.round_model.policies.interface import Candidate, Draw, StepOptions

Holder = tuple[Candidate, int]
"""Who runs, and the cells that clearing it saves in the coming batch."""

ClearingRule = Callable[[Sequence[Holder], int], Sequence[Holder]]
"""(all that run as they joined, cells short) -> those to clear, which save at least the shortage."""


def clear_all(holders: Sequence[Holder], excess: int) -> Sequence[Holder]:
    return holders


def clear_latest(holders: Sequence[Holder], excess: int) -> Sequence[Holder]:
    """As vLLM preempts: whoever joined last goes first."""
    chosen: list[Holder] = []
    for holder in reversed(holders):
        if excess <= 0:
            break
        chosen.append(holder)
        excess -= holder[1]
    return chosen


def clear_at_random(options: StepOptions) -> ClearingRule:
    """Each is cleared with probability beta, drawn again over those left until the rest fits."""
    draw: Draw | None = options.draw
    if draw is None or not 0 < options.beta <= 1:
        raise ValueError(
            f"beta={options.beta}: clearing by chance needs a probability above 0 and at most 1, and a seed"
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
    """The running, and the rule that clears some of them.

    Cleared requests keep their prediction, as in the papers, except where that would repeat for ever:
    after a second clearing with no arrival or completion in between they are known to be longer.
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
        """Use after the batch of `step` if nobody joins."""
        return self._offset + len(self._started) * (step + 1)

    def cleared(self, step: int, excess: int) -> list[Candidate]:
        """As they wait again."""
        holders = [(c, c.prompt + step + 1 - started) for c, started in self._started.values()]
        chosen = [candidate for candidate, _ in self._rule(holders, excess)]
        seen = [step - self._leave(candidate) for candidate in chosen]
        if self._is_repeating:
            chosen = [
                c if c.predicted > steps else replace(c, predicted=steps + 1)
                for c, steps in zip(chosen, seen, strict=True)
            ]
        self._is_repeating = True
        return chosen

    def _leave(self, candidate: Candidate) -> int:
        """The step it had started in."""
        _, started = self._started.pop(candidate.id)
        self._offset -= candidate.prompt - started
        return started
