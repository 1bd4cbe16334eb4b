"""Searches for a better configuration with Optuna's TPE on paired blocks.

A trial is replayed on 3, then 9, then 27 blocks, and ends early if a Wilcoxon test of its gains says that
the best is better. Trials are drawn four at a time, whatever the number of processes, so that equal results
lead to equal trials.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

import optuna

from benchmark_control_plane.tuning.blocks import RUNGS, rungs_up_to
from benchmark_control_plane.tuning.comparison import COST_PER_KEY, Comparison
from benchmark_control_plane.tuning.paired_blocks import PairedBlocks
from benchmark_control_plane.tuning.search_space import Changes, SearchSpace, Value, candidate
from benchmark_control_plane.tuning.time_budget import TimeIsOver
from controlplane.config import ConfigError

_TOGETHER = 4
"""Trials that are drawn before any of them is judged."""
_SPARSE = 12
"""Random first trials, which change few keys each."""
_MOST_KEYS = 3
_MOST_REVERTED = 8
# Three of three gains below those of the best have p = 0.125.
_P_THRESHOLD = 0.2
_SEED = 11

Fits = Callable[[int], bool]
"""Whether so many further replays end in time."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A trial that has ended: its changes, and its comparison on as many blocks as it was given."""

    changes: Changes
    comparison: Comparison

    @property
    def blocks(self) -> int:
        """Blocks that it was replayed on."""
        return len(self.comparison.gains)


@dataclass(slots=True)
class _Drawn:
    trial: optuna.Trial
    changes: Changes
    comparison: Comparison | None = None
    reported: int = 0


def search(paired: PairedBlocks, *, trials: int, fits: Fits, note: Callable[[Tried], None]) -> list[Tried]:
    """Runs trials until there are so many, or until no other `fits`; returns those that have ended.

    `note` is called with each of them. The first trial is the operator's own configuration. Raises
    ConfigurationRefused.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    choices = list(_first_choices(paired.space))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(n_startup_trials=len(choices), constant_liar=True, seed=_SEED),
            pruner=optuna.pruners.WilcoxonPruner(p_threshold=_P_THRESHOLD),
        )
    for choice in choices:
        study.enqueue_trial(choice)
    ended: list[Tried] = []
    rungs = rungs_up_to(len(paired.numbers))
    drawn = 1
    while drawn <= trials:
        # The operator's own configuration first: the others are compared with it.
        count = 1 if drawn == 1 else min(_TOGETHER, trials - drawn + 1)
        if not fits(count * rungs[0] + rungs[-1] - rungs[0]):
            break
        batch = list(_drawn(study, paired.space, count))
        drawn += count
        try:
            for each in _ended(study, paired, batch, fits):
                ended.append(each)
                note(each)
        except TimeIsOver:
            break
    return ended


def affordable_blocks(paired: PairedBlocks, replays: int, fits: Fits) -> int:
    """The blocks of the second rung, or else of the first, if so many replays of each fit; 0 if not."""
    counts = (min(rung, len(paired.numbers)) for rung in (RUNGS[1], RUNGS[0]))
    return next((count for count in counts if fits(replays * count)), 0)


def best_of(tried: Sequence[Tried], blocks: int) -> Tried | None:
    """The best trial that was given all blocks and is better than the operator's configuration, if any."""
    whole = [each for each in tried if each.blocks == blocks and each.changes and each.comparison.value > 0]
    return max(whole, key=lambda each: each.comparison.value, default=None)


def _first_choices(space: SearchSpace) -> Iterator[dict[str, int]]:
    """The operator's configuration, Tandem's defaults, single keys at their default, a few random keys."""
    own, usual = space.own(), space.defaults()
    yield own
    stated = [key for key, at in usual.items() if own[key] != at]
    if stated:
        yield {**own, **usual}
    yield from ({**own, key: usual[key]} for key in stated[:_MOST_REVERTED] if len(stated) > 1)
    draw = Random(_SEED)
    for _ in range(_SPARSE):
        keys = draw.sample(sorted(own), min(len(own), draw.randint(1, _MOST_KEYS)))
        yield {**own, **{key: draw.randrange(len(space.values[key])) for key in keys}}


def _drawn(study: optuna.Study, space: SearchSpace, count: int) -> Iterator[_Drawn]:
    for _ in range(count):
        trial = study.ask()

        def position(key: str, values: Sequence[Value], trial: optuna.Trial = trial) -> int:
            if isinstance(values[-1], str | bool):
                found: int = trial.suggest_categorical(key, list(range(len(values))))
                return found
            return trial.suggest_int(key, 0, len(values) - 1)

        try:
            yield _Drawn(trial, candidate(space, position))
        except ConfigError:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)


def _ended(study: optuna.Study, paired: PairedBlocks, batch: Sequence[_Drawn], fits: Fits) -> Iterator[Tried]:
    """The trials of a batch that end by themselves, rung by rung.

    A rung of all of them has to leave time for the other rungs of one. Without it only the most promising
    goes on, if that fits.
    """
    running = list(batch)
    rungs = rungs_up_to(len(paired.numbers))
    for before, rung in zip((0, *rungs), rungs, strict=False):
        rest = len(running) * (rung - before) + rungs[-1] - rung
        if not fits(rest) and study.trials[0].state.is_finished():
            running = _most_valued(study, running) if fits(rungs[-1] - before) else []
        if not running:
            break
        for each, comparison in zip(
            running, paired.compare([each.changes for each in running], rung), strict=True
        ):
            each.comparison = comparison
        for each in list(running):
            if each.comparison is None:
                study.tell(each.trial, state=optuna.trial.TrialState.FAIL)
                running.remove(each)
                continue
            cost = COST_PER_KEY * each.comparison.changed
            for step in range(each.reported, rung):
                each.trial.report(each.comparison.gains[step] - cost, step)
            each.reported = rung
            value = each.comparison.value
            if rung < rungs[-1]:
                estimate = _estimate(study, each.comparison.gains, cost)
                if estimate is None or not each.trial.should_prune():
                    continue
                value = min(value, estimate)
            study.tell(each.trial, value)
            running.remove(each)
            yield Tried(each.changes, each.comparison)


def _most_valued(study: optuna.Study, running: Sequence[_Drawn]) -> list[_Drawn]:
    """Ends all trials but the one that is ahead of the best so far by most, if any is; it may go on."""
    ahead = {
        each.trial.number: each.comparison.value
        for each in running
        if each.comparison is not None and each.comparison.value > study.best_value
    }
    first = max(ahead, key=lambda number: ahead[number], default=None)
    for each in running:
        if each.trial.number != first:
            study.tell(each.trial, state=optuna.trial.TrialState.FAIL)
    return [each for each in running if each.trial.number == first]


def _estimate(study: optuna.Study, gains: Sequence[float], cost: float) -> float | None:
    """The value on all blocks, by the difference from the best on those tried; None unless it is worse."""
    finished = study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])
    if not finished:
        return None
    best = study.best_trial
    behind = fmean(gains) - cost - fmean(best.intermediate_values[step] for step in range(len(gains)))
    assert best.value is not None
    return best.value + behind if behind < 0 else None
