"""Step times from device and model figures, compared with measured ones."""

import pytest

from backends.cost_models.roofline import (
    A100_40GB,
    A100_80GB,
    GPUS,
    H100_SXM,
    Device,
    ModelCosts,
    gpu_by_name,
    measure_cpu,
    model_costs,
    roofline,
    step_cost,
)
from backends.cost_models.step_time import OPT_13B_A100_80G, StepLoad
from controlplane.core.kv_geometry import GeometryError, kv_geometry

LLAMA_8B = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "hidden_act": "silu", "vocab_size": 128256,
}  # fmt: skip
LLAMA_70B = {
    "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 28672, "hidden_act": "silu", "vocab_size": 32000,
}  # fmt: skip
OPT_13B = {
    "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "ffn_dim": 20480,
    "activation_function": "relu", "vocab_size": 50272,
}  # fmt: skip
MIXTRAL = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "hidden_act": "silu", "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip


def test_roofline_overlaps_arithmetic_with_traffic():
    device = Device(operations=1_000.0, bandwidth=10.0, overhead=1.0)
    llm = ModelCosts(weights=10, weight_bytes=20, attention_width=1, cell_bytes=2)
    encoder = ModelCosts(weights=50, weight_bytes=0, attention_width=0, cell_bytes=0)
    model = roofline(device, llm, encoder)
    # One decode over 5 cells: (20 + 2 * 6) / 10 bytes against (20 + 20) / 1000 operations.
    assert model(StepLoad(decodes=1, cells=5)) == pytest.approx(3.2 + 1)
    # 20 embedded tokens add 2000 operations: 2.04 s of arithmetic still hide behind 3.2 s of traffic.
    assert model(StepLoad(decodes=1, cells=5, inputs=2, length=10)) == pytest.approx(3.2 + 1)
    assert model(StepLoad(decodes=1, cells=5, inputs=8, length=10)) == pytest.approx(8.04 + 1)
    assert model(StepLoad(inputs=2, length=10)) == pytest.approx(2.0 + 1)


@pytest.mark.parametrize(("config", "weights"), [
    # Llama-3.1-8B: 8.03e9 parameters, of which one embedding table (0.525e9) is not multiplied.
    (LLAMA_8B, 8.03e9 - 0.525e9),
    (LLAMA_70B, 68.98e9 - 0.262e9),
    (OPT_13B, 12.85e9),
    # Mixtral-8x7B states 12.9e9 active parameters.
    (MIXTRAL, 12.9e9 - 0.131e9),
])  # fmt: skip
def test_figures_count_the_weights_that_a_token_meets(config, weights):
    assert model_costs(config, 1).weights == pytest.approx(weights, rel=1e-2)
    assert model_costs(config, 1, tensor_parallel=2).weights == model_costs(config, 1).weights // 2


def test_figures_name_what_a_config_lacks():
    with pytest.raises(GeometryError, match="hidden_size"):
        model_costs({"num_hidden_layers": 2}, 1)


@pytest.mark.parametrize(("config", "cell_bytes"), [
    (LLAMA_8B, 131_072), (LLAMA_70B, 327_680), (OPT_13B, 819_200),
])  # fmt: skip
@pytest.mark.parametrize("device", [A100_80GB, H100_SXM])
def test_cell_cost_is_its_bytes_and_step_cost_the_weights(config, cell_bytes, device):
    geometry = kv_geometry(config)
    assert geometry.bytes_per_token == cell_bytes
    known = model_costs(config, cell_bytes)
    cost = step_cost(roofline(device, known))
    assert cost.cell == pytest.approx(cell_bytes / device.bandwidth)
    assert cost.step - device.overhead == pytest.approx(known.weight_bytes / device.bandwidth, rel=1e-3)
    assert 2 * known.weights / device.operations > cost.prompt_token > 0
    # The arithmetic of 64 decodes overlaps with reading the weights.
    assert cost.decode == pytest.approx(cell_bytes / device.bandwidth, rel=1e-3)


def test_roofline_is_close_to_measured_costs():
    predicted = step_cost(roofline(A100_80GB, model_costs(OPT_13B, 819_200)))
    measured = step_cost(OPT_13B_A100_80G)
    assert predicted.step == pytest.approx(measured.step, rel=0.25)
    assert predicted.cell == pytest.approx(measured.cell, rel=0.2)
    assert predicted.prompt_token == pytest.approx(measured.prompt_token, rel=0.2)


@pytest.mark.parametrize(("name", "device"), [
    ("NVIDIA A100-SXM4-40GB", A100_40GB),
    ("NVIDIA A100-SXM4-80GB", A100_80GB),
    ("NVIDIA A100 80GB PCIe", GPUS["A100 PCIe 80GB"]),
    ("NVIDIA H100 80GB HBM3", H100_SXM),
    ("NVIDIA H100 PCIe", GPUS["H100 PCIe"]),
    ("NVIDIA H200", GPUS["H200"]),
    ("NVIDIA GeForce RTX 4090", GPUS["RTX 4090"]),
    ("Tesla V100-SXM2-16GB", GPUS["V100"]),
    ("AMD Instinct MI300X", GPUS["MI300X"]),
    ("NVIDIA Next 9000", None),
])  # fmt: skip
def test_gpus_are_found_by_driver_name(name, device):
    assert gpu_by_name(name) == device


def test_a_cpu_is_measured():
    cpu = measure_cpu("float32")
    # No CPU is slower than a thousandth of the slowest GPU here, nor as fast as the fastest.
    assert 4e10 / 1e3 < cpu.operations < GPUS["B200"].operations
    assert 1e8 < cpu.bandwidth < GPUS["B200"].bandwidth


def test_steps_are_bound_by_the_slower_resource():
    by_traffic = step_cost(roofline(Device(1e30, 1e9, 0.0), ModelCosts(10, 2e6, 1, 1_000)))
    assert (by_traffic.step, by_traffic.cell) == pytest.approx((2e-3 + 1e-6, 1e-6))
    by_arithmetic = step_cost(roofline(Device(1e9, 1e30, 0.0), ModelCosts(10, 2e6, 1, 1_000)))
    assert (by_arithmetic.decode, by_arithmetic.cell) == pytest.approx((20e-9, 4e-9))
    assert step_cost(lambda load: 1e-3 * (load.decodes + load.prefill_tokens)).prompt_token == 1e-3


def test_an_idle_step_costs_nothing():
    assert roofline(H100_SXM, model_costs(LLAMA_8B, 131_072))(StepLoad()) == 0.0
