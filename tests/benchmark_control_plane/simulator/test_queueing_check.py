"""The simulator against queueing theory: waits within 2 % of the formulas, Little's law, exact recursion."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from benchmark_control_plane.simulator.queueing_check import compare, exact_waits, md1_wait, mmc_wait

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "queueing.json").read_text())["waits"]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['model']}-{row['servers']}-{row['load']}")
def test_formulas_match_the_table(row):
    formula = md1_wait(row["load"]) if row["model"] == "M/D/1" else mmc_wait(row["servers"], row["load"])
    assert formula == pytest.approx(float(Fraction(*row["wait"])), rel=1e-12)


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['model']}-{row['servers']}-{row['load']}")
def test_exact_recursion_matches_the_table(row):
    rng = np.random.default_rng(1)
    shape = (3000, 1500)
    services = np.ones(shape) if row["model"] == "M/D/1" else rng.exponential(1.0, shape)
    gaps = rng.exponential(1 / (row["servers"] * row["load"]), shape)
    waits = exact_waits(gaps, services, row["servers"])[:, 300:]
    assert waits.mean() == pytest.approx(float(Fraction(*row["wait"])), rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['model']}-{row['servers']}-{row['load']}")
def test_simulated_waits_match_theory(row):
    is_md1 = row["model"] == "M/D/1"
    # A request that finds a free slot waits half a step, so short waits need fine steps.
    steps = None if is_md1 else 100 if row["servers"] > 2 else 50
    one = compare(row["servers"], row["load"], 700 if is_md1 else 250, seed=3, steps_per_service=steps)
    assert abs(one.error) < 0.02
    if is_md1:
        assert one.simulated == pytest.approx(one.sample, rel=1e-6)
    assert one.present == pytest.approx(one.little, rel=0.02)
