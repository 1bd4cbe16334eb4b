"""Step times rise in tiles of 128 tokens, or in a straight line."""

import pytest

from backends.step_time_models import LLAMA2_70B_TP1, affine, pace, tile


def test_a_tile_costs_its_step_once() -> None:
    step_time = tile(1.0, 0.0, 10.0, 0.0)
    assert [step_time(0, n, 0) for n in (1, 128, 129, 256, 257)] == [1.0, 1.0, 11.0, 11.0, 21.0]
    assert step_time(100, 29, 0) == step_time(0, 129, 0)


def test_each_term_counts_its_own_unit() -> None:
    assert affine(1.0, 0.5, 0.25, 0.125)(2, 4, 8) == 1.0 + 1.0 + 1.0 + 1.0
    assert tile(1.0, 0.5, 0.0, 0.125)(2, 4, 8) == 1.0 + 3.0 + 1.0


def test_pace_spreads_a_tiles_cost_over_its_tokens() -> None:
    step, token = pace(tile(*LLAMA2_70B_TP1), 16_492)
    assert step == pytest.approx(0.0926 + 128 * 2.093e-4 + 8_246 * 2.5e-7, abs=1e-4)
    assert token == pytest.approx(2.093e-4 + 0.04804 / 128)
