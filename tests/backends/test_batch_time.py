"""Batch times: published arithmetic to the digit, tables exact where measured, parts that share."""

import json

import pytest

from backends.batch_time import (
    Curve,
    Device,
    Figures,
    Grid,
    StepLoad,
    embedding_line,
    embedding_table,
    figures,
    fitted_profile,
    in_turn,
    llm_only,
    read_grid,
    roofline,
)
from backends.step_time_models import affine, tile

FIT = {
    "opt": {
        "1": {
            "prefill": [20.0, 0.1, 0.001],
            "decoding_smallbs": [10.0, 0.01, 0.5],
            "decoding_largebs": [40.0, 0.01, 0.2],
            "decoding_large_small_bs_threshold": 95,
        }
    }
}


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(FIT))
    return path


def test_idle_kinds_cost_nothing():
    both = in_turn(llm_only(tile(0.1, 0, 0, 0)), embedding_line(0.02, 1e-5))
    assert both(StepLoad()) == 0
    assert both(StepLoad(decodes=3)) == pytest.approx(0.1)
    assert both(StepLoad(inputs=4, length=100)) == pytest.approx(0.024)
    assert both(StepLoad(decodes=3, inputs=4, length=100)) == pytest.approx(0.124)


def test_affine_counts_prompt_decodes_and_cells():
    model = llm_only(affine(1.0, 0.1, 0.01, 0.001))
    assert model(StepLoad(prefill_tokens=5, decodes=3, cells=7)) == pytest.approx(1.0 + 0.5 + 0.03 + 0.007)


def test_a_fitted_profile_has_its_pieces(profile):
    model = fitted_profile(profile, "opt")
    assert model(StepLoad(prefill_tokens=100, squares=100**2)) == pytest.approx(0.020 + 0.010 + 0.010)
    assert model(StepLoad(decodes=94, cells=1000)) == pytest.approx(0.010 + 0.010 + 0.047)
    assert model(StepLoad(decodes=95, cells=1000)) == pytest.approx(0.040 + 0.010 + 0.019)
    mixed = StepLoad(prefill_tokens=100, squares=100**2, decodes=94, cells=1000)
    assert model(mixed) == pytest.approx(0.067 + 0.010 + 0.010)
    with pytest.raises(ValueError, match="it has opt on 1"):
        fitted_profile(profile, "llama")


def test_a_table_is_exact_where_measured_and_linear_between(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("gpu,len,batch,ms\nA,32,1,1\nA,32,4,4\nA,64,1,2\nA,64,4,8\nB,32,1,9\nA,32,1,3\n")
    grid = read_grid(path, "len", "batch", "ms", where={"gpu": "A"})
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
    with pytest.raises(ValueError, match="no row where"):
        read_grid(path, "len", "batch", "ms", where={"len": "7"})
    with pytest.raises(ValueError, match="no column 'seconds'"):
        read_grid(path, "len", "batch", "seconds")


def test_a_grid_of_one_point_is_flat():
    assert Grid([1.0], [Curve([1.0], [0.5])]).at(7, 9) == 0.5


def test_roofline_hides_arithmetic_behind_traffic():
    device = Device(operations=1_000.0, bandwidth=10.0, overhead=1.0)
    llm = Figures(weights=10, weight_bytes=20, attention_width=1, cell_bytes=2)
    encoder = Figures(weights=50, weight_bytes=0, attention_width=0, cell_bytes=0)
    model = roofline(device, llm, encoder)
    # One decode over 5 cells: (20 + 2 * 6) / 10 bytes against (20 + 20) / 1000 operations.
    assert model(StepLoad(decodes=1, cells=5)) == pytest.approx(3.2 + 1)
    # 20 embedded tokens add 2000 operations: 2.04 s of arithmetic still hide behind 3.2 s of traffic.
    assert model(StepLoad(decodes=1, cells=5, inputs=2, length=10)) == pytest.approx(3.2 + 1)
    assert model(StepLoad(decodes=1, cells=5, inputs=8, length=10)) == pytest.approx(8.04 + 1)
    assert model(StepLoad(inputs=2, length=10)) == pytest.approx(2.0 + 1)


def test_figures_count_a_models_weights():
    # Llama-3.1-8B: 8.03e9 parameters, of which one embedding table (0.525e9) is not multiplied.
    llama = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
             "num_key_value_heads": 8, "intermediate_size": 14336, "hidden_act": "silu",
             "vocab_size": 128256}  # fmt: skip
    assert figures(llama, 131_072).weights == pytest.approx(8.03e9 - 0.525e9, rel=1e-3)
    opt = {"num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "ffn_dim": 20480,
           "activation_function": "relu", "vocab_size": 50272}  # fmt: skip
    assert figures(opt, 819_200).weights == pytest.approx(12.85e9, rel=1e-2)
