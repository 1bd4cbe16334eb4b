"""Batch times: published formulas, tables that are exact at measured points, and sums of parts."""

import pytest

from backends.cost_models.step_time import (
    LLAMA2_70B_TP1,
    Curve,
    Grid,
    PiecewiseFit,
    StepLoad,
    affine,
    embedding_line,
    embedding_table,
    llm_only,
    pace,
    read_grid,
    sequential,
    tile,
)


def test_parts_without_work_take_no_time():
    both = sequential(llm_only(tile(0.1, 0, 0, 0)), embedding_line(0.02, 1e-5))
    assert both(StepLoad()) == 0
    assert both(StepLoad(decodes=3)) == pytest.approx(0.1)
    assert both(StepLoad(inputs=4, length=100)) == pytest.approx(0.024)
    assert both(StepLoad(decodes=3, inputs=4, length=100)) == pytest.approx(0.124)


def test_affine_counts_prompt_decodes_and_cells():
    model = llm_only(affine(1.0, 0.1, 0.01, 0.001))
    assert model(StepLoad(prefill_tokens=5, decodes=3, cells=7)) == pytest.approx(1.0 + 0.5 + 0.03 + 0.007)


def test_a_fit_is_piecewise_in_the_decodes():
    model = PiecewiseFit((0.020, 1e-4, 1e-6), (0.010, 1e-5, 5e-4), (0.040, 1e-5, 2e-4), large_from=95)
    assert model(StepLoad(prefill_tokens=100, squares=100**2)) == pytest.approx(0.020 + 0.010 + 0.010)
    assert model(StepLoad(decodes=94, cells=1000)) == pytest.approx(0.010 + 0.010 + 0.047)
    assert model(StepLoad(decodes=95, cells=1000)) == pytest.approx(0.040 + 0.010 + 0.019)
    mixed = StepLoad(prefill_tokens=100, squares=100**2, decodes=94, cells=1000)
    assert model(mixed) == pytest.approx(0.067 + 0.010 + 0.010)


def test_a_table_is_exact_at_measured_points_and_linear_between(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("gpu,len,batch,ms\nA,32,1,1\nA,32,4,4\nA,64,1,2\nA,64,4,8\nA,32,1,3\n")
    grid = read_grid(path, "len", "batch", "ms")
    assert grid.at(32, 1) == pytest.approx(0.002)
    assert grid.at(64, 4) == pytest.approx(0.008)
    assert grid.at(48, 1) == pytest.approx(0.002)
    assert grid.at(64, 7) == pytest.approx(0.014)
    assert grid.at(1, 1) == pytest.approx(0.002)
    model = embedding_table(grid)
    assert (model(StepLoad(inputs=4, length=64)), model(StepLoad())) == (pytest.approx(0.008), 0)


def test_a_table_may_have_holes_but_not_be_empty(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("len,batch,ms\n32,1,1\n32,2,2\n64,2,3\n")
    assert read_grid(path, "len", "batch", "ms").at(48, 1) == pytest.approx(0.002)
    with pytest.raises(ValueError, match="no column 'seconds'"):
        read_grid(path, "len", "batch", "seconds")
    path.write_text("len,batch,ms\n")
    with pytest.raises(ValueError, match="no row"):
        read_grid(path, "len", "batch", "ms")


def test_a_grid_of_one_point_is_flat():
    assert Grid([1.0], [Curve([1.0], [0.5])]).at(7, 9) == 0.5


def test_each_tile_adds_its_cost_once():
    step_time = tile(1.0, 0.0, 10.0, 0.0)
    assert [step_time(0, n, 0) for n in (1, 128, 129, 256, 257)] == [1.0, 1.0, 11.0, 11.0, 21.0]
    assert step_time(100, 29, 0) == step_time(0, 129, 0)


def test_each_term_multiplies_its_own_count():
    assert affine(1.0, 0.5, 0.25, 0.125)(2, 4, 8) == 1.0 + 1.0 + 1.0 + 1.0
    assert tile(1.0, 0.5, 0.0, 0.125)(2, 4, 8) == 1.0 + 3.0 + 1.0


def test_pace_spreads_a_tiles_cost_over_its_tokens():
    step, token = pace(tile(*LLAMA2_70B_TP1), 16_492)
    assert step == pytest.approx(0.0926 + 128 * 2.093e-4 + 8_246 * 2.5e-7, abs=1e-4)
    assert token == pytest.approx(2.093e-4 + 0.04804 / 128)
