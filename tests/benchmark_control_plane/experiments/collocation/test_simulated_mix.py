"""Arrivals, cells and summary of the study of adaptive quotas, and one small cell of it."""

import numpy as np
import pytest

from benchmark_control_plane.common.command_line import BadInput, data_folder
from benchmark_control_plane.experiments.collocation.simulated_mix import (
    GEOMETRY,
    PATTERNS,
    POOL_BYTES,
    Cell,
    MixCapacity,
    arrivals,
    batch_time,
    play,
    policies,
)
from benchmark_control_plane.experiments.collocation.simulated_mix_summary import summary
from benchmark_control_plane.simulator.simulation import SimulatedEmbedding, SimulatedRequest


@pytest.mark.parametrize("pattern", PATTERNS)
def test_arrivals_keep_their_rate_and_end_in_time(pattern):
    rng = np.random.default_rng(0)
    counts = []
    for _ in range(30):
        times = arrivals(rng, pattern, 20.0, 50.0, 0.25)
        assert times == sorted(times) and times[-1] < 50
        counts.append(len(times))
    assert np.mean(counts) == pytest.approx(1_000, rel=0.1)


def test_a_periodic_load_has_its_phase():
    times = np.array(arrivals(np.random.default_rng(1), "periodic", 200.0, 40.0, 0.75))
    first_quarter, third_quarter = (np.mean((times % 10 // 2.5) == n) for n in (0, 2))
    assert third_quarter > 3 * first_quarter


def test_a_cell_is_deterministic_and_follows_its_mix():
    capacity = MixCapacity(llm=10.0, embedding=100.0)
    cell = Cell("9:1", "poisson", 1.0)
    offered = cell.offered(capacity, 60.0, 0)
    assert offered == cell.offered(capacity, 60.0, 0)
    assert sum(isinstance(item, SimulatedRequest) for item in offered) == pytest.approx(540, rel=0.15)
    assert sum(isinstance(item, SimulatedEmbedding) for item in offered) == pytest.approx(600, rel=0.15)


def row(policy: str, mix: str, both: float) -> dict[str, object]:
    return {
        "policy": policy, "mix": mix, "pattern": "poisson", "load": 1.0, "seed": 0, "both": both, "llm": both,
        "by_class": {"query": both},
        "embedding": both, "mean_memory": 0.5, "peak_memory": 0.9, "overflows": 0, "failed_batches": 1,
    }  # fmt: skip


def test_the_best_single_split_is_the_one_best_on_average():
    rows = [
        row("static 0.8", "9:1", 0.6), row("static 0.8", "1:9", 1.0),
        row("static 0.9", "9:1", 0.9), row("static 0.9", "1:9", 0.8),
        row("dynamic", "9:1", 0.9), row("dynamic", "1:9", 0.98),
    ]  # fmt: skip
    found = summary(rows)
    assert found["best_static"] == "static 0.9"
    against = found["dynamic_less_other"]["static 0.8"]
    assert (against["mean"], against["worst"]) == (pytest.approx(0.14), pytest.approx(-0.02))
    assert against["cells_lost_by_over_0.005"] == 1
    assert found["policies"]["dynamic"]["failed_batches"] == 2


@pytest.mark.long
@pytest.mark.data
def test_policies_stay_within_the_pool_and_are_deterministic():
    try:
        folder = data_folder(None, "profiles")
    except BadInput as absent:
        pytest.skip(str(absent))
    time = batch_time(folder)
    offered = Cell("5:5", "bursty", 1.5).offered(MixCapacity(10.0, 100.0), 3.0, 0)
    for policy in policies(time):
        if policy.name in ("dynamic", "static 0.925"):
            found = play(policy, offered)
            assert found.overflows == found.failed_batches == 0
            assert found.peak_memory <= 1
            assert play(policy, offered) == found
    assert GEOMETRY.bytes_per_token == 131_072 and POOL_BYTES % GEOMETRY.bytes_per_block == 0
