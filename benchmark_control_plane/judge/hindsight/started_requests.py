"""Generations of a schedule with hindsight, and whether one more may start beside those that run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

from benchmark_control_plane.judge.hindsight.least_work import RequestWork
from benchmark_control_plane.judge.simulated_target import BLOCK_TOKENS
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection

Counts = npt.NDArray[np.int64]


@dataclass(eq=False, slots=True)
class StartedRequest:
    """A generation of `prompt` tokens with its first `computed` tokens in the KV cache.

    `produced` tokens of its output were delivered and `left` are to come. Once the first was, the last one is
    late after `due` and the next one after `next_due`. `pace` are the most seconds for each token after the
    first, on average.
    """

    work: RequestWork
    prompt: int = field(init=False)
    left: int = field(init=False)
    pace: float = field(init=False)
    computed: int = 0
    produced: int = 0
    due: float = inf
    next_due: float = inf

    def __post_init__(self) -> None:
        decodes = self.work.decodes
        self.prompt, self.left = self.work.planned.prompt_tokens, decodes + 1
        self.pace = self.work.after_first / decodes if decodes else inf

    @property
    def blocks(self) -> int:
        """Blocks that it holds at the end of the next step, at most."""
        return _blocks(self.computed + 1 if self.produced else self.prompt)


class StartCheck:
    """Whether a request may start beside those that run, in the step that comes next.

    Of the use of memory only the times just before a request ends matter, since it grows in between. It is
    computed once for all requests that are tried.
    """

    def __init__(
        self, running: Sequence[StartedRequest], device: SimulatedDeviceSection, blocks: int | None
    ) -> None:
        """Reads the running requests; `blocks` None is no memory limit."""
        self._device = device
        self._blocks = blocks
        self._sequences = len(running)
        self._cells = sum([one.prompt + one.produced for one in running])
        self._pace = min([one.pace for one in running], default=inf)
        if blocks is None:
            return
        self._left = np.array([one.left for one in running], dtype=np.int64)
        self._held = np.array([one.prompt + one.produced for one in running], dtype=np.int64)
        self._ends = np.unique(self._left)
        ahead = self._ends[:, np.newaxis]
        self._use: Counts = np.where(self._left >= ahead, _each_blocks(self._held + ahead), 0).sum(axis=1)
        self._peak = self._peak_ahead = 0
        if running:
            at = int(self._use.argmax())
            self._peak, self._peak_ahead = int(self._use[at]), int(self._ends[at])

    def may_start(self, newcomer: StartedRequest) -> bool:
        """Whether memory suffices until each request ends, and a decode step keeps the strictest pace."""
        return self._keeps_pace(newcomer) and self._fits(newcomer)

    def _keeps_pace(self, newcomer: StartedRequest) -> bool:
        base, _, per_decode, per_cell = self._device.step
        step = base + per_decode * (self._sequences + 1) + per_cell * (self._cells + newcomer.prompt)
        return step <= min(self._pace, newcomer.pace)

    def _fits(self, newcomer: StartedRequest) -> bool:
        if self._blocks is None:
            return True
        left, held = newcomer.left, newcomer.prompt
        most = _blocks(held + left)
        if self._peak + most <= self._blocks:
            return True
        if self._peak_ahead <= left and self._peak + _blocks(held + self._peak_ahead) > self._blocks:
            return False
        own = np.where(self._ends <= left, _each_blocks(held + self._ends), 0)
        at_its_end = int(_each_blocks(self._held[self._left >= left] + left).sum()) + most
        return max(int((self._use + own).max(initial=0)), at_its_end) <= self._blocks


def _blocks(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def _each_blocks(tokens: Counts) -> Counts:
    """`_blocks` of each number, int64 [n]."""
    blocks: Counts = (tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    return blocks
