"""One run of `tandem tune`: self-check, search, ablation and verdict, each within its part of the time."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from benchmark_control_plane.decision_replay.replayed_requests import (
    Group,
    RequestResult,
    logged_results,
)
from benchmark_control_plane.decision_replay.self_check import SLOWER, SelfCheck, checked
from benchmark_control_plane.tuning.ablation import KeyEffect, earned_changes
from benchmark_control_plane.tuning.blocks import Block
from benchmark_control_plane.tuning.comparison import Comparison
from benchmark_control_plane.tuning.evaluation import BlockResult, Evaluator, Sections
from benchmark_control_plane.tuning.paired_blocks import PairedBlocks
from benchmark_control_plane.tuning.search_space import Changes, SearchSpace
from benchmark_control_plane.tuning.trial_search import Tried, best_of, search

# What follows the search: keys taken back one by one, and the verdict.
_SEARCH_SHARE = 0.7

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BlockSets:
    """The blocks of the search, those of the verdict, and the latter on a slower device."""

    search: Sequence[Block]
    held_out: Sequence[Block]

    @property
    def all(self) -> list[Block]:
        """All blocks in the order of their numbers."""
        slower = [
            replace(block, traffic=replace(block.traffic, machine=block.traffic.slower(SLOWER)))
            for block in self.held_out
        ]
        return [*self.search, *self.held_out, *slower]

    @property
    def numbers(self) -> tuple[range, range, range]:
        """The numbers of the three kinds."""
        first, second = len(self.search), len(self.search) + len(self.held_out)
        return range(first), range(first, second), range(second, second + len(self.held_out))

    def fingerprint(self, release: str) -> str:
        """A digest of all that a replay of the blocks depends on but the configuration."""
        digest = hashlib.sha256(release.encode())
        for block in [*self.search, *self.held_out]:
            machine = replace(block.traffic.machine, batch_time=None)  # type: ignore[arg-type]
            digest.update(orjson.dumps([list(block.traffic.rows), block.first, block.last]))
            digest.update(repr((block.traffic.costs, machine)).encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a run found.

    Attributes:
        check: the self-check; nothing else is known if it failed.
        tried: the trials that ended.
        best: the best trial on all blocks of the search, if one is better than the operator's configuration.
        changes: the changes that earn their place; empty if nothing better was found.
        effects: what each of them brings, on the blocks of the search.
        verdict: the operator's configuration with these changes, on the held-out blocks.
    """

    check: SelfCheck
    tried: Sequence[Tried] = ()
    best: Tried | None = None
    changes: Changes | None = None
    effects: Sequence[KeyEffect] = ()
    verdict: Comparison | None = None

    @property
    def is_better(self) -> bool:
        """Whether the verdict is that the changes are better."""
        return self.verdict is not None and self.verdict.is_better


def tune_log(
    traffic: RecordedTraffic,
    blocks: BlockSets,
    evaluator: Evaluator,
    space: SearchSpace,
    *,
    weights: Mapping[str, float],
    served: Callable[[Mapping[str, Any]], Sections],
    seconds: float,
    trials: int,
    note: Note,
    on_trial: Callable[[Tried], None],
) -> Tuned:
    """Runs all stages; `seconds` bounds the time of the replays of self-check and search.

    Raises ConfigurationRefused, ConfigError and BadInput.
    """
    searched, held_out, slower = blocks.numbers
    note(f"self-check: {len(held_out)} blocks of the second half under the configuration of the log")
    check = check_blocks(traffic, blocks.held_out, evaluator, held_out, slower)
    if not check.has_passed:
        return Tuned(check)
    paired = PairedBlocks(evaluator, searched, space, weights, served)
    note(f"search on {len(searched)} blocks of the first half")
    most = _SEARCH_SHARE * seconds
    tried = search(paired, trials=trials, is_over=lambda: evaluator.seconds > most, note=on_trial)
    best = best_of(tried, len(searched))
    if best is None:
        return Tuned(check, tried)
    note("ablation: each changed key alone as it was")
    changes, effects = earned_changes(paired, best.changes, note=note)
    if not changes:
        return Tuned(check, tried, best)
    note(f"verdict on {len(held_out)} held-out blocks")
    (verdict,) = replace(paired, numbers=held_out).compare([changes])
    return Tuned(check, tried, best, changes, effects, verdict)


def check_blocks(
    traffic: RecordedTraffic,
    held_out: Sequence[Block],
    evaluator: Evaluator,
    numbers: Sequence[int],
    slower: Sequence[int],
) -> SelfCheck:
    """The self-check of `tandem replay` on blocks: the log's own configuration against the log."""
    measured: list[RequestResult] = []
    groups: dict[Group, list[int]] = {}
    for block in held_out:
        for group, members in block.groups.items():
            groups.setdefault(group, []).extend(len(measured) + number for number in members)
        measured += logged_results(block.traffic.rows[block.first : block.last])

    def under_log(which: Sequence[int]) -> list[RequestResult]:
        found: list[BlockResult] = evaluator.results([(traffic.sections, number) for number in which])
        return [result for block in found for result in block.requests]

    replayed = under_log(numbers)
    return checked(dict(sorted(groups.items())), measured, replayed, lambda: under_log(slower))


def state_file(out: Path) -> Path:
    """The file with the results of the replays of a run that writes `out`."""
    return out.with_name(out.name + ".tuning")
