"""One run of `tandem tune`: self-check, search, ablation and verdict, each within its part of the time."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from benchmark_control_plane.decision_replay.replayed_requests import (
    Group,
    RequestResult,
    logged_results,
)
from benchmark_control_plane.decision_replay.self_check import SLOWER, SelfCheck, checked
from benchmark_control_plane.tuning.ablation import KeyEffect, Note, earned_changes, unmeasured
from benchmark_control_plane.tuning.blocks import RUNGS, Block
from benchmark_control_plane.tuning.comparison import Comparison, difference, points
from benchmark_control_plane.tuning.evaluation import BlockResult, Evaluator, Sections, digest_of
from benchmark_control_plane.tuning.load_curve import LoadPoint, curve_replays, load_curve
from benchmark_control_plane.tuning.paired_blocks import PairedBlocks
from benchmark_control_plane.tuning.search_space import Changes, SearchSpace, acting_changes
from benchmark_control_plane.tuning.time_budget import TimeIsOver
from benchmark_control_plane.tuning.trial_search import Tried, best_of, search

# One configuration on its blocks may take this share of the time; otherwise fewer blocks are used.
_BLOCK_SHARE = 0.1
# What follows the search, ablation and verdict, has this share; or so many times what the verdict takes.
_AFTER_SEARCH, _VERDICT_TIMES = 0.3, 1.5
_LEAST_VERDICT = 2
# Blocks on which the verdict is repeated on a slower device.
_SLOWER_BLOCKS = RUNGS[1]


def _sources() -> list[Path]:
    """The files of the code that a replay runs; a clone has one version number for many states."""
    root = Path(__file__).parents[2]
    folders = ("controlplane", "backends", "predictors", "benchmark_control_plane")
    return sorted(file for folder in folders for file in (root / folder).rglob("*.py"))


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

    def fingerprint(self) -> str:
        """A digest of all that a replay of the blocks depends on but the configuration, the code included."""
        digest = hashlib.sha256()
        for source in _sources():
            digest.update(source.read_bytes())
        for block in [*self.search, *self.held_out]:
            machine = replace(block.traffic.machine, batch_time=None)  # type: ignore[arg-type]
            digest.update(orjson.dumps([list(block.traffic.rows), block.first, block.last]))
            delays = sorted(block.traffic.host_delays.items())
            digest.update(repr((block.traffic.costs, machine, delays)).encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a run found.

    Attributes:
        check: the self-check; nothing else is known if it failed.
        blocks: blocks of each half of the log that were used at most.
        tried: the trials that ended.
        best: the best trial on all blocks of the search, if one is better than the operator's configuration.
        changes: the changes that earn their place; empty if nothing better was found.
        effects: what each of them brings, on the blocks of the search.
        verdict: the operator's configuration with these changes, on the held-out blocks; None without
            changes, or if the time was over.
        loads: attainment over load, with and without the changes.
        cuts: what the time did not suffice for.
    """

    check: SelfCheck
    blocks: int
    tried: Sequence[Tried] = ()
    best: Tried | None = None
    changes: Changes | None = None
    effects: Sequence[KeyEffect] = ()
    verdict: Comparison | None = None
    loads: Sequence[LoadPoint] = ()
    cuts: Sequence[str] = ()

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
    trials: int,
    note: Note,
    on_trial: Callable[[Tried], None],
) -> Tuned:
    """Runs all stages within the time of the evaluator's budget, and says what it did not suffice for.

    Raises ConfigurationRefused, ConfigError, BadInput, and TimeIsOver if not even a self-check fits.
    """
    time, count = evaluator.time, _blocks_in_time(traffic, evaluator, blocks)
    searched, held_out, slower = (numbers[:count] for numbers in blocks.numbers)
    note(f"self-check: {len(held_out)} blocks of the second half under the configuration of the log")
    check = check_blocks(traffic, blocks.held_out[:count], evaluator, held_out, slower)
    result = Tuned(check, count, cuts=time.cuts)
    if not check.has_passed:
        return result
    paired = PairedBlocks(evaluator, searched, space, weights, served)
    note(f"search on {len(searched)} blocks of the first half")
    # The results of the operator's configuration are known if it is that of the log.
    is_known = digest_of(served(space.content)) == digest_of(traffic.sections)
    verdict = (1 if is_known else 2) * count
    after = verdict + 2 * _SLOWER_BLOCKS

    def search_fits(replays: int) -> bool:
        reserved = max(_AFTER_SEARCH * time.seconds, _VERDICT_TIMES * time.cost(after))
        return time.fits(replays, reserved=reserved)

    def ablation_fits(replays: int) -> bool:
        return time.fits(replays, reserved=time.cost(after + curve_replays(RUNGS[0])))

    tried = search(paired, trials=trials, fits=search_fits, note=on_trial)
    if not tried:
        time.cuts.append("search: not even the operator's configuration could be tried")
    best = best_of(tried, len(searched))
    if best is None:
        return replace(result, tried=tried)
    note("ablation: each changed key alone as it was")
    changes, effects = best.changes, unmeasured(best.changes)
    try:
        changes, effects = earned_changes(
            paired, best.changes, fits=ablation_fits, note=note, cut=time.cuts.append
        )
    except TimeIsOver:
        time.cuts.append("ablation: replays took longer than those before, and all changes stay")
    changes = acting_changes(space, changes)
    effects = [each for each in effects if each.key in changes]
    result = replace(result, tried=tried, best=best, changes=changes, effects=effects)
    if not changes:
        return result
    judged, slow = replace(paired, numbers=held_out), replace(paired, numbers=slower)
    return _judged(result, traffic, judged, slow, verdict, note)


def _judged(
    result: Tuned,
    traffic: RecordedTraffic,
    paired: PairedBlocks,
    slow: PairedBlocks,
    replays: int,
    note: Note,
) -> Tuned:
    """The result with its verdict and the curve over load; `replays` is how many a whole verdict takes."""
    time, changes = paired.evaluator.time, result.changes or {}
    try:
        verdict = _verdict(paired, changes, replays, note)
    except TimeIsOver:
        time.cuts.append("verdict: replays took longer than those before, and there is none")
        return result
    if verdict is None:
        return result
    verdict = replace(verdict, self_check=_self_check_error(traffic, paired, len(verdict.gains)))
    note("verdict on a slower device")
    device = _device_error(slow, verdict, changes)
    if device is None:
        time.cuts.append("verdict: its error does not count what a slower device changes")
    else:
        verdict = replace(verdict, device=device)
    result = replace(result, verdict=verdict)
    note("attainment over load")
    try:
        loads = load_curve(paired, changes, fits=time.fits)
    except TimeIsOver:
        loads = []
    if not loads:
        time.cuts.append("load: attainment over load is not measured")
    return replace(result, loads=loads)


def _blocks_in_time(traffic: RecordedTraffic, evaluator: Evaluator, blocks: BlockSets) -> int:
    """The number of blocks of each kind that one configuration can be tried on, by the time of a few."""
    time, (_, held_out, _) = evaluator.time, blocks.numbers
    evaluator.results([(traffic.sections, number) for number in held_out[: RUNGS[0]]])
    most = max(len(blocks.search), len(blocks.held_out))
    # As many as the shortest log that is tuned has.
    count = max(RUNGS[1], time.affordable(_BLOCK_SHARE * time.seconds, most))
    if not time.fits(count - RUNGS[0]):
        raise TimeIsOver
    if count < most:
        time.cuts.append(f"blocks: {count} of {most} of each half of the log are used")
    return count


def _verdict(paired: PairedBlocks, changes: Changes, replays: int, note: Note) -> Comparison | None:
    """The comparison on as many held-out blocks as fit; None if too few do. Raises TimeIsOver.

    `replays` is how many it takes on all of them.
    """
    time, most = paired.evaluator.time, len(paired.numbers)
    count = time.affordable(time.left, replays) * most // replays
    if count < most:
        what = f"{count} of {most} held-out blocks" if count >= _LEAST_VERDICT else "there is none"
        time.cuts.append(f"verdict: {what}")
    if count < _LEAST_VERDICT:
        return None
    note(f"verdict on {count} held-out blocks")
    (found,) = paired.compare([changes], count)
    return found


def _self_check_error(traffic: RecordedTraffic, paired: PairedBlocks, count: int) -> float:
    """Points between replay and log under the log's configuration, and what so many blocks cannot tell."""
    numbers = paired.numbers[:count]
    # All of them are known from the self-check.
    replayed = paired.evaluator.results([(traffic.sections, number) for number in numbers])
    apart = []
    for number, result in zip(numbers, replayed, strict=True):
        block = paired.evaluator.blocks[number]
        logged = logged_results(block.traffic.rows[block.first : block.last])
        kept = (points(block, each, paired.weights) for each in (result.requests, logged))
        apart.append(next(kept) - next(kept))
    found = difference(apart)
    return hypot(found.mean, found.error)


def _device_error(slow: PairedBlocks, verdict: Comparison, changes: Changes) -> float | None:
    """Points by which the gain differs on a slower device, on a few blocks; None without time for them."""
    count = min(_SLOWER_BLOCKS, len(verdict.gains))
    if not slow.evaluator.time.fits(2 * count):
        return None
    try:
        (found,) = slow.compare([changes], count)
    except TimeIsOver:
        return None
    return None if found is None else abs(found.gain.mean - fmean(verdict.gains[:count]))


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
