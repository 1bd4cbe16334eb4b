"""The headline of a report states only what was measured."""

from typing import Any

import pytest

from benchmark_control_plane.report.headline import cards, headline
from tests import experiments


def text_of(content: Any) -> str:
    return headline(content).replace("\N{MULTIPLICATION SIGN}", "x")


def with_rates(tandem: float | None, split: float | None, plain: float | None = None) -> Any:
    content: Any = experiments.results()
    rates = {"tandem": tandem, "static-split": split, "plain": plain}
    content["max_goodput_rate"] = [
        {"system": name, "target": 0.9, "rps": rate, "per_seed": [rate] * 3} for name, rate in rates.items()
    ]
    return content


def test_a_ratio_below_one_is_stated_in_the_same_form() -> None:
    assert text_of(with_rates(4.0, 8.0)) == (
        "At 90 % attainment, tandem serves 4 req/s: 0.50x (the same over 3 seeds) "
        "the best baseline (static-split, 8 req/s)."
    )


def test_the_ratio_is_relative_to_the_best_baseline() -> None:
    assert "plain, 7 req/s" in text_of(with_rates(9.0, 5.0, 7.0))


def test_a_condition_is_compared_with_its_own_baseline() -> None:
    content = with_rates(4.0, 8.0, 3.0)
    names = {"tandem": "tandem, one", "tandem-no-forecast": "tandem, two", "plain": "plain, one",
             "static-split": "plain, two"}  # fmt: skip
    for entry in [*content["systems"], *content["runs"], *content["max_goodput_rate"]]:
        key = "name" if "name" in entry else "system"
        entry[key] = names[entry[key]]
        if entry.get("kind") == "ablation":
            entry["kind"] = "tandem"
    assert "(plain, one, 3 req/s)" in text_of(content)
    notes = {note for *_, note in cards(content) if "plain" in note}
    assert notes == {"1.33\N{MULTIPLICATION SIGN} (the same over 3 seeds) plain, one"}


def test_an_unsaturated_rate_is_a_lower_bound() -> None:
    # The highest load of the experiment is twice 8 req/s.
    sentence = text_of(with_rates(16.0, 8.0))
    assert "tandem serves at least 16 req/s: at least 2.00x" in sentence
    sentence = text_of(with_rates(16.0, 16.0))
    assert "the loads were too low to compare them" in sentence and "x (" not in sentence


def test_a_baseline_that_is_unsaturated_on_one_seed_has_no_ratio() -> None:
    """On that seed the ratio would be an upper bound."""
    content = with_rates(14.0, 8.0)
    content["max_goodput_rate"][1]["per_seed"] = [8.0, 16.0, 8.0]
    sentence = text_of(content)
    assert "x (" not in sentence and sentence.endswith(
        "was not saturated on every seed: the loads were too low to compare them."
    )


def test_a_range_of_ratios_ends_with_a_lower_bound_where_ours_is_one() -> None:
    content = with_rates(12.0, 8.0)
    content["max_goodput_rate"][0]["per_seed"] = [8.0, 12.0, 16.0]
    assert "1.50x (1.00x to at least 2.00x over 3 seeds)" in text_of(content)


def test_a_card_states_no_ratio_to_an_unsaturated_baseline() -> None:
    notes = [note.replace("\N{MULTIPLICATION SIGN}", "x") for *_, note in cards(with_rates(16.0, 8.0))]
    assert notes[0] == "at least 2.00x (the same over 3 seeds) static-split"
    assert cards(with_rates(16.0, 16.0))[0][2] == "not compared with static-split"


def test_a_seed_without_a_rate_of_ours_counts_as_zero() -> None:
    content = with_rates(9.0, 6.0)
    content["max_goodput_rate"][0]["per_seed"] = [None, 9.0, 9.0]
    assert "1.50x (0.00x to 1.50x over 3 seeds)" in text_of(content)


def test_rates_are_compared_on_the_seeds_that_both_systems_have() -> None:
    content = with_rates(9.0, 6.0)
    own, split = content["max_goodput_rate"][:2]
    own |= {"per_seed": [8.0, 9.0, 10.0], "seeds": [1, 2, 3]}
    split |= {"per_seed": [5.0, 6.0], "seeds": [3, 1], "rps": 5.5}
    assert "serves 9 req/s: 1.64x (1.33x to 2.00x over 2 seeds)" in text_of(content)
    split |= {"per_seed": [6.0], "seeds": [4], "rps": 6.0}
    assert text_of(content).endswith(
        "the best baseline (static-split, 6 req/s) has too few valid runs on the same seeds to compare them."
    )


def test_a_baseline_of_unknown_rate_is_not_said_to_miss_the_target() -> None:
    content = with_rates(9.0, None)
    del content["max_goodput_rate"][1:]
    assert text_of(content).endswith("; the rate of static-split, plain is not known.")
    content = with_rates(9.0, 5.0)
    del content["max_goodput_rate"][0]
    assert text_of(content).startswith("At 200 % load, tandem meets the SLO of ")


@pytest.mark.parametrize(
    ("tandem", "split", "sentence"),
    [
        (None, None, "tandem reaches 90 % attainment at no offered rate."),
        (
            None,
            8.0,
            "tandem reaches 90 % attainment at no offered rate; static-split does at 8 req/s.",
        ),
        (
            9.0,
            None,
            "At 90 % attainment, tandem serves 9 req/s; no baseline reaches it at any offered rate.",
        ),
    ],
)
def test_a_target_that_is_never_reached_is_stated(
    tandem: float | None, split: float | None, sentence: str
) -> None:
    assert text_of(with_rates(tandem, split)) == sentence


def test_a_target_that_no_system_reaches_is_followed_by_the_next_one() -> None:
    content = with_rates(None, None)
    lower = [row | {"target": 0.6, "rps": 6.0, "per_seed": [6.0]} for row in content["max_goodput_rate"]]
    lower[0] |= {"rps": 9.0, "per_seed": [9.0]}
    content["max_goodput_rate"] += lower
    sentence = text_of(content)
    assert sentence.startswith("No system reaches 90 % attainment at any offered rate. At 60 % attainment, ")
    assert "tandem serves 9 req/s: 1.50x" in sentence
    content["max_goodput_rate"][1] |= {"rps": 8.0, "per_seed": [8.0]}
    assert text_of(content).startswith("tandem reaches 90 % attainment at no offered rate; ")


def test_a_baseline_that_reaches_the_target_on_some_seeds_is_not_said_to_reach_it_nowhere() -> None:
    content = with_rates(9.0, None)
    split = next(row for row in content["max_goodput_rate"] if row["system"] == "static-split")
    split["per_seed"] = [None, 8.0, None]
    assert text_of(content).endswith("; no baseline reaches it in most seeds.")


def test_without_rates_the_headline_states_attainment_under_the_highest_load() -> None:
    content = experiments.results()
    content["max_goodput_rate"] = []
    sentence = text_of(content)
    assert (
        sentence.startswith("At 200 % load, tandem meets the SLO of ")
        and "second is tandem-no-forecast" in sentence
    )
