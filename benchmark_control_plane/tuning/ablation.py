"""Takes back the changes that do not earn their place: each key alone, then all idle ones together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmark_control_plane.tuning.blocks import RUNGS
from benchmark_control_plane.tuning.comparison import COST_PER_KEY, Comparison, Difference, difference
from benchmark_control_plane.tuning.paired_blocks import PairedBlocks
from benchmark_control_plane.tuning.search_space import Changes, Value
from controlplane.config import ConfigError

_QUICK = RUNGS[1]
# The 90 % bound of a normal distribution as a part of half its 95 % interval: 1.28 / 1.96.
_SURE = 0.65


@dataclass(frozen=True, slots=True)
class KeyEffect:
    """What a changed key brings: the configuration less the one with only this key as it was, in points.

    `gain` is None if the server refuses the configuration without the change.
    """

    key: str
    gain: Difference | None

    @property
    def is_earned(self) -> bool:
        """Whether the gain exceeds its cost and, with 90 %, chance; or the change is needed."""
        return self.gain is None or (
            self.gain.mean > COST_PER_KEY and self.gain.mean > _SURE * self.gain.error
        )

    @property
    def mean(self) -> float:
        """The mean gain; infinite for a change that is needed."""
        return float("inf") if self.gain is None else self.gain.mean


def earned_changes(
    paired: PairedBlocks, changes: Changes, *, note: Callable[[str], None]
) -> tuple[Changes, Sequence[KeyEffect]]:
    """The changes that earn their place, and what each of them brings on all blocks.

    Keys that bring nothing on a few blocks are taken back together. As long as that costs more than they do,
    the best of them is kept after all. Raises ConfigurationRefused.
    """
    kept = dict(changes)
    while kept:
        effects = effects_of(paired, kept, count=_QUICK)
        idle = sorted((each for each in effects if not each.is_earned), key=lambda each: each.mean)
        note(f"{len(kept)} changed keys, {len(idle)} of them without a clear effect")
        reduced = _reduced(paired, kept, idle)
        if reduced == kept:
            break
        kept = dict(reduced)
    effects = effects_of(paired, kept) if kept else []
    while idle := [each for each in effects if not each.is_earned]:
        worst = min(idle, key=lambda each: each.mean)
        kept = _without(kept, worst.key)
        note(f"{worst.key} is taken back")
        effects = effects_of(paired, kept) if kept else []
    return kept, effects


def effects_of(paired: PairedBlocks, changes: Changes, *, count: int | None = None) -> list[KeyEffect]:
    """What each key brings, on the first `count` blocks. Raises ConfigurationRefused."""
    valid = {key: variant for key in changes if _is_valid(paired, variant := _without(changes, key))}
    whole, *others = paired.compare([changes, *valid.values()], count)
    by_key = dict(zip(valid, others, strict=True))
    return [KeyEffect(key, _gain(whole, by_key.get(key))) for key in changes]


def _gain(whole: Comparison | None, reverted: Comparison | None) -> Difference | None:
    if whole is None or reverted is None:
        return None
    return difference([one - other for one, other in zip(whole.gains, reverted.gains, strict=True)])


def _reduced(paired: PairedBlocks, changes: Changes, idle: Sequence[KeyEffect]) -> Changes:
    """The changes without as many of the idle keys, from the least useful on, as may be missed."""
    for count in range(len(idle), 0, -1):
        dropped = {each.key for each in idle[:count]}
        variant = {key: value for key, value in changes.items() if key not in dropped}
        if not _is_valid(paired, variant):
            continue
        whole, reduced = paired.compare([changes, variant])
        if whole is not None and reduced is not None and reduced.value >= whole.value:
            return variant
    return changes


def _without(changes: Changes, key: str) -> dict[str, Value]:
    return {name: value for name, value in changes.items() if name != key}


def _is_valid(paired: PairedBlocks, changes: Changes) -> bool:
    try:
        paired.served(paired.space.changed(changes))
    except ConfigError:
        return False
    return True
