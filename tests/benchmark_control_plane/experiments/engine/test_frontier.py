"""The rate search on curves with a known crossing, and the table of studies."""

from types import SimpleNamespace

import pytest

from benchmark_control_plane.experiments.engine.frontier import (
    KEYS,
    highest_rate,
    starts_like,
    table,
    with_study,
)


def crossing(at: float, start: float, seen: dict) -> tuple[float, int]:
    evaluations = 0

    def attain(rate: float) -> SimpleNamespace:
        nonlocal evaluations
        evaluations += 1
        return SimpleNamespace(strict=1 / (1 + (rate / at) ** 3))

    return highest_rate(attain, seen, "strict", 0.5, start), evaluations


@pytest.mark.parametrize("start", [0.3, 1.3, 2.4, 2.5, 2.6, 10.0, 60.0])
def test_the_crossing_is_found_from_anywhere(start):
    found, evaluations = crossing(2.5, start, {})
    assert found == pytest.approx(2.5, rel=0.01)
    assert evaluations <= 12


def test_two_evaluations_suffice_near_the_crossing():
    assert crossing(2.5, 2.45, {})[1] == 2


def test_known_rates_are_not_run_again():
    seen: dict = {}
    crossing(2.5, 2.45, seen)
    assert crossing(2.5, 2.45, seen)[1] == 0


def test_a_target_that_no_rate_reaches_gives_zero():
    found = highest_rate(lambda _: SimpleNamespace(strict=0.0), {}, "strict", 0.9, 1.3)
    assert found == 0.0


def test_a_search_starts_at_the_rate_of_similar_studies_scaled_by_the_bounds():
    def a_study(data: str, policy: str, prediction: str, seed: int, rate: float) -> dict:
        return {
            "dataset": data, "policy": policy, "prediction": prediction, "seed": seed,
            "rates": dict.fromkeys(KEYS, rate),
        }  # fmt: skip

    studies = [
        a_study("d", "a", "known", 1, 1.0),
        a_study("d", "a", "known", 2, 3.0),
        a_study("d", "a", "noisy", 1, 7.0),
        a_study("d", "b", "known", 1, 9.0),
    ]
    bounds = {"d": {"90%": 2.0, "60%": 2.0}, "e": {"90%": 4.0, "60%": 6.0}}

    def start(*sought: str, seed: int = 3) -> dict[str, float]:
        return starts_like(studies, bounds, (*sought, seed), 8.0)

    assert start("d", "a", "known") == start("d", "a-variant", "known") == dict.fromkeys(KEYS, 2.0)
    assert (
        start("d", "a", "known", seed=2)
        == start("d", "a-variant", "known", seed=2)
        == dict.fromkeys(KEYS, 3.0)
    )
    assert start("d", "a", "noisy") == dict.fromkeys(KEYS, 7.0)
    assert start("d", "other", "known") == dict.fromkeys(KEYS, 8.0)
    assert start("e", "a", "known") == {key: 4.0 if key.endswith("90%") else 6.0 for key in KEYS}


def test_studies_stay_sorted_by_key():
    def a_study(policy: str, seed: int, rate: float) -> dict:
        return {"dataset": "d", "policy": policy, "prediction": "oracle", "seed": seed, "rate": rate}

    studies: list = []
    for new in (a_study("b", 2, 1.0), a_study("b", 1, 2.0), a_study("a", 3, 3.0), a_study("b", 2, 4.0)):
        studies = with_study(studies, new)
    assert studies == [a_study("a", 3, 3.0), a_study("b", 1, 2.0), a_study("b", 2, 4.0)]


def test_the_table_names_the_commits_of_a_row():
    def commits(*of: str | None) -> str:
        studies = [
            {
                "dataset": "d", "policy": "a", "prediction": "oracle", "seed": seed, "points": [],
                "window": {"warm_up": 0, "requests": 9}, "rates": dict.fromkeys(KEYS, 1.0),
            } | ({"commit": commit} if commit else {})
            for seed, commit in enumerate(of)
        ]  # fmt: skip
        return table(studies, {}).splitlines()[-1].split("|")[-2].strip()

    assert commits("0123456789", "0123456789") == "0123456"
    assert commits("b" * 40, None, "a" * 40) == "aaaaaaa, bbbbbbb, unknown"


def test_the_table_compares_with_stock_fcfs_and_the_fluid_bound():
    def a_study(policy: str, seed: int, rate: float) -> dict:
        memory = {"held_share": 0.85 - rate / 100, "met_share": 0.7} if seed == 2 else {}
        point = {"rate": rate, "strict": 0.95, "longest_gap": 30.0, "missed_wait": {"p95": 20.0}, **memory}
        return {
            "dataset": "d", "policy": policy, "prediction": "oracle", "seed": seed,
            "window": {"warm_up": 0, "requests": 9}, "rates": dict.fromkeys(KEYS, rate), "points": [point],
        }  # fmt: skip

    studies = [a_study("stock-fcfs", 1, 1.0), a_study("stock-fcfs", 2, 3.0), a_study("tandem", 2, 6.0)]
    lines = table(studies, {"d": {"100%": 4.0, "90%": 7.0, "60%": 9.0}}).splitlines()[2:]
    assert len({line.count("|") for line in table(studies, {}).splitlines()}) == 1
    rows = {cells[3]: cells for cells in ([cell.strip() for cell in line.split("|")] for line in lines)}
    assert set(rows["stock-fcfs"][5:9]) == {"2.00 ± 1.41 (1.00x)"}
    held = ["79% (70%)"] * 2
    assert rows["tandem"][4:] == ["2", *["6.00 (2.00x)"] * 4, "30", "20", *held, "", "", "unknown", ""]
    # Not all seeds recorded it.
    assert rows["stock-fcfs"][11:13] == ["", ""]
    assert rows["fluid bound"][5:9] == [*["7.00 (3.50x)"] * 2, *["9.00 (4.50x)"] * 2]


def test_the_table_shows_rejections_and_attainment_by_class():
    def a_study(seed: int, interactive: float, *, rejected: float) -> dict:
        point = {
            "rate": 1.0, "strict": 0.95, "longest_gap": 30.0, "missed_wait": {"p95": 20.0},
            "rejected": rejected, "by_class": {"batch": 0.5, "interactive": interactive},
            "embeddings": 0.75,
        }  # fmt: skip
        return {
            "dataset": "d", "policy": "tandem-gate", "prediction": "oracle", "seed": seed,
            "window": {"warm_up": 0, "requests": 9}, "rates": dict.fromkeys(KEYS, 1.0), "points": [point],
        }  # fmt: skip

    row = table([a_study(1, 0.9, rejected=0.1), a_study(2, 1.0, rejected=0.2)], {}).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")][13:15] == ["15.0%", "batch 50%, interactive 95% (75%)"]
