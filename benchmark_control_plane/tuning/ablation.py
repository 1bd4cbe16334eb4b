"""Takes back the changes that do not earn their place: each key alone, then all idle ones together.

Where the time does not suffice, keys are measured on fewer blocks or not at all, and stay unless they are
measured to bring too little.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmark_control_plane.tuning.comparison import COST_PER_KEY, Comparison, Difference, difference
from benchmark_control_plane.tuning.paired_blocks import PairedBlocks
from benchmark_control_plane.tuning.search_space import Changes, Value
from benchmark_control_plane.tuning.trial_search import Fits, affordable_blocks
from controlplane.config import ConfigError

# The 90 % bound of a normal distribution as a part of half its 95 % interval: 1.28 / 1.96.
_SURE = 0.65

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KeyEffect:
    """What a changed key brings: the configuration less the one with only this key as it was, in points.

    `gain` is None if the server refuses the configuration without the change, or if it is not measured.
    """

    key: str
    gain: Difference | None
    is_measured: bool = True

    @property
    def is_earned(self) -> bool:
        """Whether the gain exceeds its cost and, with 90 %, chance; or it is not known."""
        return self.gain is None or (
            self.gain.mean > COST_PER_KEY and self.gain.mean > _SURE * self.gain.error
        )

    @property
    def mean(self) -> float:
        """The mean gain; infinite for one that is not known."""
        return float("inf") if self.gain is None else self.gain.mean


def earned_changes(
    paired: PairedBlocks, changes: Changes, *, fits: Fits, note: Note, cut: Note
) -> tuple[Changes, Sequence[KeyEffect]]:
    """The changes that earn their place, and what each of them brings, on all blocks if that fits.

    Keys that bring nothing on a few blocks are taken back together. As long as that costs more than they do,
    the best of them is kept after all. `cut` is called with each part that does not fit. Raises
    ConfigurationRefused and TimeIsOver.
    """
    kept = dict(changes)
    effects, count = unmeasured(kept), 0
    while kept:
        if not (count := affordable_blocks(paired, len(kept), fits)):
            cut(f"ablation: what the {len(kept)} changed keys bring is not measured, and all of them stay")
            return kept, unmeasured(kept)
        effects = effects_of(paired, kept, count=count)
        idle = sorted((each for each in effects if not each.is_earned), key=lambda each: each.mean)
        note(f"{len(kept)} changed keys, {len(idle)} of them without a clear effect")
        reduced = _reduced(paired, kept, idle, fits=fits, cut=cut)
        if reduced == kept:
            break
        kept = dict(reduced)
    total = len(paired.numbers)
    while kept:
        if not fits(len(kept) * total):
            cut(f"ablation: it ends early, with what each key brings on {count} of {total} blocks")
            return kept, [each for each in effects if each.key in kept]
        effects, count = effects_of(paired, kept), total
        if not (idle := [each for each in effects if not each.is_earned]):
            return kept, effects
        worst = min(idle, key=lambda each: each.mean)
        kept = _without(kept, worst.key)
        note(f"{worst.key} is taken back")
    return kept, []


def unmeasured(changes: Changes) -> Sequence[KeyEffect]:
    """Changes whose effects are not measured."""
    return [KeyEffect(key, None, is_measured=False) for key in changes]


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


def _reduced(
    paired: PairedBlocks, changes: Changes, idle: Sequence[KeyEffect], *, fits: Fits, cut: Note
) -> Changes:
    """The changes without as many of the idle keys, from the least useful on, as may be missed."""
    for count in range(len(idle), 0, -1):
        dropped = {each.key for each in idle[:count]}
        variant = {key: value for key, value in changes.items() if key not in dropped}
        if not _is_valid(paired, variant):
            continue
        if not fits(len(paired.numbers)):
            cut(f"ablation: {count} of the keys without a clear effect could not be tried together")
            return changes
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
