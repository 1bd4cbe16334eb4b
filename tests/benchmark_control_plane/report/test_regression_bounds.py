"""Bounds on results: violations, and invalid files of bounds."""

from pathlib import Path
from typing import Any

import pytest

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.report.regression_bounds import Bound, read_bounds, value_at, violations
from tests import experiments

EXAMPLE = Path("configs/bench/gate-example.yaml")


def with_attainment(*values: float) -> Any:
    content = experiments.results(loads=(1.0,), seeds=tuple(range(len(values))))
    for run, value in zip([r for r in content["runs"] if r["system"] == "tandem"], values, strict=True):
        run["attainment"]["overall"] = value
    return content


def lines(content: Any, **bound: Any) -> list[str]:
    return list(violations(content, [Bound(**bound)]))


def test_the_example_is_valid_and_good_results_pass_it() -> None:
    bounds = read_bounds(EXAMPLE)
    assert len(bounds) == 5
    assert list(violations(experiments.results(), bounds)) == []


def test_the_median_counts_unless_the_worst_seed_is_requested() -> None:
    content = with_attainment(0.85, 0.95, 0.97)
    bound: dict[str, Any] = {"metric": "attainment.overall", "system": "tandem", "min": 0.9}
    assert lines(content, **bound) == []
    complaint = "tandem at 100 % load: attainment.overall is 0.85; at least 0.9 is required"
    assert lines(content, **bound, seeds="worst") == [complaint]


def test_bounds_are_inclusive() -> None:
    content = with_attainment(0.9)
    assert lines(content, metric="attainment.overall", system="tandem", min=0.9, max=0.9) == []
    assert len(lines(content, metric="attainment.overall", system="tandem", max=0.899)) == 1


def test_without_system_and_load_a_bound_applies_everywhere() -> None:
    content = experiments.results(loads=(0.5, 1.0))
    assert len(lines(content, metric="goodput_rps", max=0.0)) == len(experiments.SYSTEMS) * 2
    assert len(lines(content, metric="goodput_rps", load=1.0, max=0.0)) == len(experiments.SYSTEMS)


def test_an_unmeasured_metric_is_a_violation() -> None:
    content = experiments.results(loads=(1.0,))
    unknown = "tandem at 100 % load: attainment.unknown was not measured in any valid run"
    assert lines(content, metric="attainment.unknown", system="tandem", min=0.0) == [unknown]
    assert lines(content, metric="goodput_rps", load=3.0, min=0.0) == [
        "goodput_rps: no run of system any at load 300 %"
    ]
    for run in content["runs"]:
        run["valid"] = False
    assert len(lines(content, metric="goodput_rps", system="tandem", min=0.0)) == 1


def test_partial_results_fail_every_gate() -> None:
    assert "partial" in lines(experiments.results(partial=True), metric="goodput_rps", min=0.0)[0]


def test_the_frontier_is_bounded_by_target() -> None:
    content = experiments.results()
    assert lines(content, metric="max_goodput_rate", system="tandem", target=0.9, min=11.0) == []
    complaint = "static-split at 90 %: max_goodput_rate is 5.6; at least 11 is required"
    assert lines(content, metric="max_goodput_rate", system="static-split", target=0.9, min=11.0) == [
        complaint
    ]
    content["max_goodput_rate"][0]["per_seed"] = [None, None, 5.6]
    assert "is 0;" in lines(content, metric="max_goodput_rate", system="static-split", target=0.9, min=1.0)[0]


def test_the_value_of_a_figure_with_an_interval_counts() -> None:
    run = experiments.results(loads=(1.0,))["runs"][0]
    assert value_at(run, "percentiles.interactive.ttft_ms.p50") == 90.0
    assert value_at(run, "valid") is None and value_at(run, "goodput_rps.x") is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", ": one key `bounds` with a list is needed, as in configs/bench/gate-example.yaml"),
        ("bounds: []", ": bounds=[]: a gate without bounds checks nothing; state at least one"),
        ("bounds: [{min: 1}]", ": bounds.0.metric: missing; it is required, for example attainment.overall"),
        ("bounds: [{metric: a}]", ": bounds.0: neither min nor max; state at least one"),
        ("bounds: [{metric: a, min: x}]", ": bounds.0.min='x': a finite number is needed"),
        ("bounds: [{metric: a, min: .nan}]", ": bounds.0.min=nan: a finite number is needed"),
        ("bounds: [{metric: a, min: 2, max: 1}]", ": bounds.0: min=2 is above max=1; swap them"),
        (
            "bounds: [{metric: a, min: 1, seeds: best}]",
            ": bounds.0.seeds='best': one of median, worst is needed",
        ),
        (
            "bounds: [{metric: a, min: 1, target: 0.9}]",
            ": bounds.0.target: a is measured by load; state load instead",
        ),
        (
            "bounds: [{metric: a, minimum: 1}]",
            ": bounds.0.minimum: unknown; known are load, max, metric, min, seeds, system, target",
        ),
    ],
)
def test_a_mistake_in_the_bounds_is_reported_with_its_place(
    tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "bounds.yaml"
    file.write_text(text)
    with pytest.raises(BadInput) as caught:
        read_bounds(file)
    assert str(caught.value) == f"{file}{complaint}"


def test_an_absent_or_broken_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file or directory; give the path"):
        read_bounds(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("bounds: [")
    with pytest.raises(BadInput) as caught:
        read_bounds(tmp_path / "bad.yaml")
    assert "\n" not in str(caught.value)
