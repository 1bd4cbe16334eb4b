"""Search, ablation and resumption on blocks whose results are a formula of the configuration."""

from math import inf

import pytest

from benchmark_control_plane.tuning.ablation import earned_changes
from benchmark_control_plane.tuning.evaluation import Evaluator
from benchmark_control_plane.tuning.paired_blocks import ConfigurationRefused
from benchmark_control_plane.tuning.time_budget import TimeBudget
from benchmark_control_plane.tuning.trial_search import best_of, search
from tests.benchmark_control_plane.tuning.synthetic_blocks import Formula, block, paired


def attainment(sections):
    """The head start brings 20 points and the queue 10; everything else nothing."""
    start = sections["scheduling"].get("priority_head_start_ms", 0)
    return 0.5 + 0.2 * (1_000 <= start <= 4_000) + 0.1 * (sections["admission"]["max_waiting"] >= 250)


def ignored(_):
    pass


def up_to(most, pool):
    return lambda more: pool.replays + more <= most


def earned(found, changes):
    return earned_changes(found, changes, fits=always, note=ignored, cut=pytest.fail)


def always(_):
    return True


@pytest.mark.long
def test_the_search_finds_what_helps_and_the_ablation_drops_the_rest(tmp_path):
    found = paired(Formula(attainment), tmp_path / "state")
    tried = search(found, trials=24, fits=always, note=ignored)
    assert tried[0].changes == {} and tried[0].comparison.gain.mean == 0
    best = best_of(tried, 27)
    assert best is not None
    assert best.comparison.value > 15
    changes, effects = earned(found, {**best.changes, "admission.tpot_guard": False})
    assert changes.keys() == {"scheduling.priority_head_start_ms", "admission.max_waiting"}
    gains = {each.key: each.gain.mean for each in effects}
    assert gains["scheduling.priority_head_start_ms"] == pytest.approx(20, abs=6)
    assert gains["admission.max_waiting"] == pytest.approx(10, abs=6)


def test_bad_trials_end_on_the_first_rung(tmp_path):
    def only_worse(sections):
        return 0.9 if sections["scheduling"] == {"priority_head_start_ms": 0} else 0.4

    found = paired(Formula(only_worse), tmp_path / "state")
    tried = search(found, trials=12, fits=always, note=ignored)
    changed = [each for each in tried if "scheduling.priority_head_start_ms" in each.changes]
    assert changed and all(each.blocks == 3 for each in changed)
    best = best_of(tried, 27)
    assert best is None or "scheduling.priority_head_start_ms" not in best.changes


def test_equal_results_give_equal_trials_and_nothing_is_replayed_twice(tmp_path):
    state = tmp_path / "state"
    pool = Formula(attainment)
    first = search(paired(pool, state), trials=13, fits=always, note=ignored)
    assert pool.replays == len(state.read_text().splitlines())
    # A crash in the middle of a row.
    torn = state.read_text()[:-20]
    state.write_text(torn + "\n")
    again = Formula(attainment)
    resumed = paired(again, state)
    resumed.evaluator.remember(state.read_text().splitlines())
    second = search(resumed, trials=13, fits=always, note=ignored)
    assert [each.changes for each in second] == [each.changes for each in first]
    assert again.replays == 1


@pytest.mark.long
def test_the_search_ends_with_its_time_and_keeps_whole_trials(tmp_path):
    pool = Formula(attainment)
    tried = search(
        paired(pool, tmp_path / "state"),
        trials=100,
        fits=lambda more: pool.replays + more <= 200,
        note=ignored,
    )
    assert 1 < len(tried) < 40
    assert 150 < pool.replays <= 200


def test_a_trial_that_is_ahead_when_the_time_ends_is_finished(tmp_path):
    pool = Formula(attainment)
    tried = search(
        paired(pool, tmp_path / "state"),
        trials=100,
        fits=lambda more: pool.replays + more <= 63,
        note=ignored,
    )
    best = best_of(tried, 27)
    assert best is not None and best.comparison.value > 15
    # The operator's configuration, one batch on the first rung, and the rest of one trial.
    assert pool.replays == 27 + 4 * 3 + 24


def test_a_refused_trial_is_left_out_and_a_refused_start_is_an_error(tmp_path):
    def refuses(sections):
        return "no room" if sections["admission"]["max_waiting"] >= 250 else attainment(sections)

    tried = search(paired(Formula(refuses), tmp_path / "state"), trials=16, fits=always, note=ignored)
    assert tried and all(each.changes.get("admission.max_waiting", 0) < 250 for each in tried)
    with pytest.raises(ConfigurationRefused, match="no room"):
        search(paired(Formula(lambda _: "no room"), tmp_path / "other"), trials=4, fits=always, note=ignored)


def test_an_ablation_that_needs_a_key_keeps_it(tmp_path):
    def only_together(sections):
        start = sections["scheduling"].get("priority_head_start_ms", 0)
        if start and sections["admission"]["max_waiting"] == 50:
            return "no room"
        return 0.8 if start else 0.5

    found = paired(Formula(only_together), tmp_path / "state")
    changes = {"scheduling.priority_head_start_ms": 2_000, "admission.max_waiting": 500}
    kept, effects = earned(found, changes)
    assert kept == changes
    assert [each.gain is None for each in effects] == [False, True]


def test_nothing_is_kept_of_changes_without_effect(tmp_path):
    found = paired(Formula(lambda _: 0.7), tmp_path / "state")
    changes = {"admission.max_wait_ms": 15_000, "admission.defer_threshold_ms": 50, "quota.max_step": 0.1}
    kept, effects = earned(found, changes)
    assert (kept, list(effects)) == ({}, [])


CHANGES = {"scheduling.priority_head_start_ms": 2_000, "admission.max_waiting": 500, "quota.max_step": 0.1}


@pytest.mark.parametrize(
    ("replays", "kept", "blocks", "says"),
    [
        # 3 keys on 3 blocks beside the whole and the operator's configuration, then nothing.
        (0, 3, 0, ["is not measured"]),
        (3 * 3, 3, 3, ["could not be tried together", "on 3 of 27 blocks"]),
        (3 * 9, 3, 9, ["could not be tried together", "on 9 of 27 blocks"]),
        (3 * 9 + 27 + 2 * 9, 2, 9, ["on 9 of 27 blocks"]),
        (3 * 9 + 27 + 2 * 9 + 2 * 27, 2, 27, []),
    ],
)
def test_an_ablation_is_cut_to_its_time(tmp_path, replays, kept, blocks, says):
    pool = Formula(attainment)
    found = paired(pool, tmp_path / "state")
    found.compare([CHANGES])
    before, cuts = pool.replays, []
    changes, effects = earned_changes(
        found,
        CHANGES,
        fits=lambda more: pool.replays + more <= before + replays,
        note=ignored,
        cut=cuts.append,
    )
    assert pool.replays <= before + replays
    assert len(changes) == len(effects) == kept
    assert all(each.is_measured == bool(blocks) for each in effects)
    assert ("quota.max_step" in changes) == (kept == 3)
    assert len(cuts) == len(says)
    assert all(text in line for text, line in zip(says, cuts, strict=True)), cuts


def test_an_evaluator_without_a_pool_replays_here(tmp_path):
    with (tmp_path / "state").open("w") as file:
        evaluator = Evaluator([block()], file, None, TimeBudget(inf, 1))
        (found,) = evaluator.results([({"classes": {"a": {}, "b": {}}}, 0)])
    assert "exactly one class is the default" in found.refused
