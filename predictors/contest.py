"""Which of two ways to foretell is given out? The favourite, until the answers say otherwise.

Rule: the other takes over while it has saved more than both together would lose on `_HEAD_START` answers, by
their mean losses lately. So never within so many answers, whatever they were; after three times as many if it
loses half of what the favourite does; and in the end the one that loses less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

_HEAD_START = 8
_MEMORY = 128


@dataclass(slots=True)
class Contest:
    """Ways are 0 and 1. `losses` are means over the last answers, `judged` counts all."""

    favourite: int
    judged: int = 0
    losses: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def judge(self, losses: Sequence[float]) -> None:
        self.judged += 1
        rate = max(1 / self.judged, 1 / _MEMORY)
        self.losses = [mean + rate * (loss - mean) for mean, loss in zip(self.losses, losses, strict=True)]

    @property
    def best(self) -> int:
        other = 1 - self.favourite
        saved = self.losses[self.favourite] - self.losses[other]
        return other if self.judged * saved > _HEAD_START * sum(self.losses) else self.favourite
