"""Costs, coverage and table of the hidden-state study, on its committed results."""

import json

import pytest

from backends.cost_models.roofline import A100_40GB
from benchmark_control_plane.common import results_file
from benchmark_control_plane.experiments.hidden_cache.attainment import PUBLISHED, costs, table


@pytest.fixture(scope="module")
def runs():
    return json.loads(results_file.PUBLISHED.joinpath("hybrid-attainment.json").read_text(encoding="utf-8"))[
        "runs"
    ]


def test_costs_of_opt_13b_follow_from_its_arithmetic():
    forms = costs(A100_40GB, 40, 40, 128)
    # 4 d n hd operations per token and layer, at 0.6 of 312 TFLOP/s.
    assert forms["M0"].token_seconds == pytest.approx(4 * 5120 * 5120 * 40 / (0.6 * 312e12))
    # Two matrices of 5120 x 5120 in 16 bits, 40 layers, at 0.8 of 1,555 GB/s.
    assert forms["M2"].step_seconds == pytest.approx(2 * 5120 * 5120 * 2 * 40 / (0.8 * 1.555e12))


def test_every_published_cell_was_run(runs):
    assert {(r["data"], r["rate"], r["variation"]) for r in runs} == set(PUBLISHED)


@pytest.mark.parametrize("form", ["M0", "M2"])
def test_hidden_states_do_not_lower_attainment(runs, form):
    """Within 2 points; one request of 300 is 0.33 points, and restored states are rarely chosen."""
    for run in runs:
        assert run["of"][form]["published"] >= run["of"]["KV"]["published"] - 2.0, run


def test_the_table_has_a_line_for_each_cell(runs):
    assert len(table(runs).splitlines()) == 1 + len(
        {(r["order"], r["data"], r["rate"], r["variation"]) for r in runs}
    )
