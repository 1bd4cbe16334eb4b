"""The sentence on top of a report says no more than was measured."""

from typing import Any

import pytest

from benchmark_control_plane.report.headline import headline
from tests import experiments


def said(content: Any) -> str:
    return headline(content).replace("\N{MULTIPLICATION SIGN}", "x")


def with_rates(tandem: float | None, split: float | None, plain: float | None = None) -> Any:
    content: Any = experiments.results()
    rates = {"tandem": tandem, "static-split": split, "plain": plain}
    content["max_goodput_rate"] = [
        {"system": name, "target": 0.9, "rps": rate, "per_seed": [rate] * 3} for name, rate in rates.items()
    ]
    return content


def test_a_loss_is_told_like_a_win() -> None:
    assert said(with_rates(4.0, 8.0)) == (
        "At 90 % attainment, tandem serves 4 req/s: 0.50x (the same over 3 seeds) "
        "the best baseline (static-split, 8 req/s)."
    )


def test_the_best_baseline_is_the_one_to_beat() -> None:
    assert "plain, 7 req/s" in said(with_rates(9.0, 5.0, 7.0))


def test_a_rate_that_no_load_was_high_enough_to_find_is_a_lower_bound() -> None:
    # The highest load of the experiment is twice eight requests a second.
    sentence = said(with_rates(16.0, 8.0))
    assert "tandem serves at least 16 req/s: at least 2.00x" in sentence
    sentence = said(with_rates(16.0, 16.0))
    assert "the loads were too low to tell them apart" in sentence and "x (" not in sentence


def test_a_seed_on_which_ours_kept_it_at_no_rate_counts() -> None:
    content = with_rates(9.0, 6.0)
    content["max_goodput_rate"][0]["per_seed"] = [None, 9.0, 9.0]
    assert "1.50x (0.00x to 1.50x over 3 seeds)" in said(content)


@pytest.mark.parametrize(
    ("tandem", "split", "sentence"),
    [
        (None, None, "tandem keeps 90 % attainment at no rate that was offered."),
        (
            None,
            8.0,
            "tandem keeps 90 % attainment at no rate that was offered; static-split does at 8 req/s.",
        ),
        (
            9.0,
            None,
            "At 90 % attainment, tandem serves 9 req/s; no baseline keeps it at any rate that was offered.",
        ),
    ],
)
def test_a_target_that_is_never_met_is_said(tandem: float | None, split: float | None, sentence: str) -> None:
    assert said(with_rates(tandem, split)) == sentence


def test_without_a_search_the_attainment_under_the_highest_load_is_the_finding() -> None:
    content = experiments.results()
    content["max_goodput_rate"] = []
    sentence = said(content)
    assert sentence.startswith("At 200 % load, tandem meets ") and "next comes tandem-no-forecast" in sentence
