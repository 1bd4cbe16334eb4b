"""Changes from A to B over paired runs."""

import copy
import math

import pytest

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.report.compare import Change, ResultsComparison, compare_results, t_interval
from tests import experiments


def found(comparison: ResultsComparison, system: str, load: float, metric: str) -> Change:
    return next(c for c in comparison.changes if (c.place, c.metric) == ((system, load), metric))


def test_identical_results_have_no_change() -> None:
    content = experiments.results()
    comparison = compare_results(content, content)
    assert comparison.worse == () and not any(change.is_clear() for change in comparison.changes)
    assert comparison.unpaired == 0
    assert comparison.text().splitlines()[-1].startswith("0 of ")


def test_lower_attainment_in_every_pair_is_worse() -> None:
    before = experiments.results(loads=(1.0,))
    after = copy.deepcopy(before)
    for run, fall in zip(
        [r for r in after["runs"] if r["system"] == "tandem"], (0.10, 0.12, 0.11), strict=True
    ):
        run["attainment"]["interactive"] = (run["attainment"]["interactive"] or 0.0) - fall
    comparison = compare_results(before, after)
    assert [(c.place, c.metric) for c in comparison.worse] == [(("tandem", 1.0), "attainment.interactive")]
    fallen = comparison.worse[0]
    # Three pairs: the quantile of t with two degrees of freedom is 4.3027, the deviation of the falls 0.01.
    assert fallen.value == pytest.approx(-0.11)
    assert fallen.interval == pytest.approx(
        (-0.11 - 4.30265 * 0.01 / math.sqrt(3), -0.11 + 4.30265 * 0.01 / math.sqrt(3))
    )
    assert "WORSE" in comparison.text()
    assert compare_results(after, before).worse == ()


def test_changes_in_both_directions_give_no_verdict() -> None:
    before = experiments.results(loads=(1.0,))
    after = copy.deepcopy(before)
    for run, change in zip(
        [r for r in after["runs"] if r["system"] == "tandem"], (-0.1, 0.12, -0.05), strict=True
    ):
        run["goodput_rps"] *= 1 + change
    assert compare_results(before, after).worse == ()


def test_latencies_are_compared_as_ratios_and_not_judged() -> None:
    before = experiments.results(loads=(1.0,))
    after = copy.deepcopy(before)
    for run, by in zip([r for r in after["runs"] if r["system"] == "tandem"], (1.5, 2.0, 3.0), strict=True):
        figure = run["percentiles"]["interactive"]["ttft_ms"]["p99"]
        assert figure is not None and figure[0] is not None
        figure[0] *= by
    comparison = compare_results(before, after)
    change = found(comparison, "tandem", 1.0, "interactive.ttft_ms.p99")
    assert change.value == pytest.approx(9 ** (1 / 3)) and change.pairs == 3
    assert comparison.worse == ()


def test_only_valid_runs_of_both_are_paired() -> None:
    before, after = experiments.results(loads=(1.0,)), experiments.results(loads=(1.0, 2.0))
    assert before["runs"][5]["valid"] is False
    comparison = compare_results(before, after)
    assert found(comparison, "plain", 1.0, "goodput_rps").pairs == 2
    assert {load for _, load in (change.place for change in comparison.changes)} == {1.0}
    # One run is valid in B only, and B has 11 valid runs at the second load.
    assert comparison.unpaired == 1 + 11
    assert "12 valid runs have no counterpart" in comparison.text()


def test_partial_results_are_marked() -> None:
    text = compare_results(experiments.results(), experiments.results(partial=True)).text()
    assert "B is partial" in text and "A is partial" not in text


def test_one_pair_gives_no_interval_and_no_verdict() -> None:
    before = experiments.results(loads=(1.0,), seeds=(1,))
    after = copy.deepcopy(before)
    for run in after["runs"]:
        run["goodput_rps"] /= 2
    comparison = compare_results(before, after)
    assert comparison.worse == () and "none (one pair)" in comparison.text()


def test_results_without_a_common_run_raise() -> None:
    with pytest.raises(BadInput, match="share no valid run of the same system, load and seed"):
        compare_results(experiments.results(seeds=(1, 2)), experiments.results(seeds=(3, 4)))


def test_the_interval_is_students_t() -> None:
    assert t_interval([1.0]) is None
    assert t_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3 - 1.96324, 3 + 1.96324), abs=1e-4)


def test_a_difference_in_load_or_objectives_is_stated() -> None:
    before = experiments.results(loads=(1.0,))
    assert compare_results(before, copy.deepcopy(before)).differences == ()
    after = copy.deepcopy(before)
    after["capacity_rps"], after["slos"] = 9.5, {"interactive": {"ttft_ms": 250.0}}
    comparison = compare_results(before, after)
    assert comparison.differences[0] == "100 % load is 8 requests per second in A and 9.5 in B"
    assert "interactive.tpot_ms is 40 ms in A and \N{EM DASH} in B" in comparison.differences
    assert not any("ttft_ms is 250" in difference for difference in comparison.differences)
    assert "not the same: 100 % load is 8 requests" in comparison.text()
    assert comparison.facts()["differences"] == list(comparison.differences)
