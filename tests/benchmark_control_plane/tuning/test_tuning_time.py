"""`tandem tune` ends within its time whatever a replay costs, and says what was cut: on a scripted clock."""

from pathlib import Path

import pytest

from benchmark_control_plane.tuning import evaluation
from benchmark_control_plane.tuning.evaluation import Evaluator
from benchmark_control_plane.tuning.load_curve import LOADS
from benchmark_control_plane.tuning.search_space import search_space
from benchmark_control_plane.tuning.time_budget import TimeBudget, TimeIsOver
from benchmark_control_plane.tuning.tuning_run import BlockSets, tune_log
from tests.benchmark_control_plane.tuning.synthetic_blocks import (
    CONTENT,
    WEIGHTS,
    Clock,
    Formula,
    block,
    served,
)

SECONDS = 600.0


def attainment(sections):
    """Two keys bring 20 and 10 points; under the log's own configuration, without sections, all is met."""
    if not sections:
        return 2.0
    start = sections["scheduling"].get("priority_head_start_ms", 0)
    return 0.5 + 0.2 * (1_000 <= start <= 4_000) + 0.1 * (sections["admission"]["max_waiting"] >= 250)


def tuned(file: Path, replay_seconds):
    """What a run finds in which a replay takes so long, its time, and its executor."""
    clock = Clock()
    pool = Formula(attainment, clock, replay_seconds)
    return *run(file, clock, pool), pool


def run(file: Path, clock, pool):
    blocks = BlockSets([block()] * 27, [block()] * 27)
    time = TimeBudget(SECONDS, 1, clock.now, clock.now())
    with file.open("a+", encoding="utf-8") as state:
        state.seek(0)
        lines = state.read().splitlines()
        evaluator = Evaluator(blocks.all, state, pool, time)
        evaluator.remember(lines)
        found = tune_log(
            block().traffic, blocks, evaluator, search_space(CONTENT, has_quotas=True), weights=WEIGHTS,
            served=served, trials=400, note=lambda _: None, on_trial=lambda _: None,
        )  # fmt: skip
    return found, time


@pytest.mark.long
@pytest.mark.parametrize("replay_seconds", [1.0, 2.5, 5.0, 10.0, 40.0])
def test_the_whole_command_ends_within_its_time(tmp_path, replay_seconds):
    found, time, _ = tuned(tmp_path / "state", replay_seconds)
    assert time.used <= SECONDS
    assert found.check.has_passed
    if found.best is not None:
        assert found.verdict is not None
    if replay_seconds <= 1.0:
        assert [(each.load, each.blocks) for each in found.loads] == [(load, 9) for load in LOADS]
        # The formula of these blocks knows no load: the points differ by its noise alone.
        assert all(each.after - each.before > each.error for each in found.loads)
        assert found.is_better
        assert found.blocks == len(found.verdict.gains) == 27
    if replay_seconds >= 5.0:
        assert found.blocks == (10 if replay_seconds == 5.0 else 9)
        assert any("of 27 of each half" in line for line in found.cuts), found.cuts


def test_without_time_for_one_configuration_nothing_is_searched(tmp_path):
    found, time, _ = tuned(tmp_path / "state", 50.0)
    assert (found.best, found.tried) == (None, [])
    assert any(line.startswith("search:") for line in found.cuts)
    assert time.used <= SECONDS


def test_without_time_for_a_self_check_there_is_an_error(tmp_path, monkeypatch):
    clock = Clock()
    pool = Formula(attainment, clock, 350.0)
    monkeypatch.setattr(evaluation, "replayed", lambda _, sections: pool.submit(None, 0, sections).result())
    with pytest.raises(TimeIsOver):
        run(tmp_path / "state", clock, pool=None)
    assert pool.replays == 1


@pytest.mark.long
def test_a_run_that_is_repeated_finds_the_same_without_a_replay(tmp_path):
    first, used, _ = tuned(tmp_path / "state", 1.5)
    second, again, pool = tuned(tmp_path / "state", 1.5)
    assert pool.replays == 0
    assert [each.changes for each in second.tried] == [each.changes for each in first.tried]
    assert (second.changes, second.cuts) == (first.changes, first.cuts)
    assert second.verdict.gains == first.verdict.gains
    assert again.used == pytest.approx(used.used)


def test_replays_are_predicted_by_those_before_and_by_the_processes():
    clock = Clock(100.0)
    time = TimeBudget(60.0, 4, clock.now, clock.now())
    assert time.cost(1_000) == 0.0 and time.fits(1_000)
    time.measured(1.0)
    time.measured(3.0)
    # 1.2 times the mean of 2 s, four at a time.
    assert time.cost(4) == pytest.approx(2.4)
    assert time.cost(5) == pytest.approx(4.8)
    assert time.affordable(10.0, 100) == 16
    assert (time.affordable(10.0, 5), time.affordable(-1.0, 5)) == (5, 0)
    clock.seconds += 50
    assert time.fits(16) and not time.fits(17) and not time.fits(16, reserved=1.0)


def test_replays_of_an_earlier_run_take_as_long_as_they_did_together():
    clock = Clock()
    time = TimeBudget(60.0, 2, clock.now, clock.now())
    time.taken_over([4.0, 1.0, 1.0, 1.0])
    assert time.used == 4.0


def test_no_replay_begins_after_the_end(tmp_path):
    clock = Clock()
    time = TimeBudget(10.0, 1, clock.now, clock.now())
    with (tmp_path / "state").open("w", encoding="utf-8") as file:
        evaluator = Evaluator([block()], file, Formula(attainment, clock, 11.0), time)
        assert len(evaluator.results([({}, 0)])) == 1
        # What is known costs nothing.
        assert len(evaluator.results([({}, 0)])) == 1
        with pytest.raises(TimeIsOver):
            evaluator.results([({"scheduling": {}, "admission": {"max_waiting": 1}}, 0)])
