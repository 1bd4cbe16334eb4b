"""Roofline model of a step: the time that its arithmetic or its memory traffic takes on a device.

A step takes the longer of the two plus a fixed overhead. It gives a prior before anything is measured. GPUs
are looked up by name; a CPU is measured.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from backends.cost_models.step_time import BatchTime, StepLoad
from controlplane.core.engine_reports import StepCost
from controlplane.core.kv_geometry import DTYPE_BYTES, optional, required

# Share of the peaks that dense kernels of common shapes reach.
_OPERATIONS_REACHED, _BANDWIDTH_REACHED = 0.6, 0.8
_OVERHEAD = 2e-3
# Workload of `step_cost`: a full prompt chunk, and decodes with contexts of medium length.
_CHUNK, _DECODES, _CONTEXT = 2_048, 64, 1_024


@dataclass(frozen=True, slots=True)
class Device:
    """Achievable arithmetic (operations/s), memory bandwidth (bytes/s) and fixed overhead of a step (s)."""

    operations: float
    bandwidth: float
    overhead: float = _OVERHEAD


def _gpu(teraflops: float, terabytes: float, overhead: float = _OVERHEAD) -> Device:
    """Derives a device from data-sheet peaks: dense 16-bit TFLOP/s and memory bandwidth in TB/s."""
    return Device(_OPERATIONS_REACHED * teraflops * 1e12, _BANDWIDTH_REACHED * terabytes * 1e12, overhead)


A100_40GB = _gpu(312, 1.555, 3e-3)
A100_80GB = _gpu(312, 2.039, 3e-3)
H100_SXM = _gpu(989, 3.35)

# By words of the driver's name; specific names come before general ones.
GPUS: Mapping[str, Device] = {
    "B200": _gpu(2_250, 7.7),
    "GH200": _gpu(989, 4.0),
    "H200": _gpu(989, 4.8),
    "H100 NVL": _gpu(835, 3.9),
    "H100 PCIe": _gpu(756, 2.0),
    "H100": H100_SXM,
    "A100 40GB": A100_40GB,
    "A100 PCIe 80GB": _gpu(312, 1.935, 3e-3),
    "A100": A100_80GB,
    "A40": _gpu(149.7, 0.696),
    "A30": _gpu(165, 0.933),
    "A10G": _gpu(70, 0.6),
    "A10": _gpu(125, 0.6),
    "L40S": _gpu(362, 0.864),
    "L40": _gpu(181, 0.864),
    "L4": _gpu(121, 0.3),
    "RTX A6000": _gpu(155, 0.768),
    "RTX 4090": _gpu(165, 1.008),
    "RTX 3090": _gpu(71, 0.936),
    "V100": _gpu(125, 0.9),
    "T4": _gpu(65, 0.32),
    "MI300X": _gpu(1_307, 5.3),
}


def gpu_by_name(name: str) -> Device | None:
    """Looks up the driver's name ("NVIDIA A100-SXM4-40GB"); None for an unknown GPU."""
    words = set(re.split(r"[\s-]+", name.lower()))
    return next((device for known, device in GPUS.items() if words >= set(known.lower().split())), None)


def measure_cpu(dtype: str) -> Device:
    """Measures this CPU with torch's current threads, in some tens of milliseconds.

    Raises AttributeError if torch has no such dtype.
    """
    import torch

    side, size = 512, 1 << 24
    a = torch.ones(side, side, dtype=getattr(torch, dtype))
    # As layers multiply, with one row of weights per output: without bfloat16 instructions a plain product is
    # 15 times slower than this one.
    linear = torch.nn.functional.linear
    source, target = torch.ones(2, size)
    product = min(_seconds(lambda: linear(a, a)) for _ in range(3))
    copy = min(_seconds(lambda: target.copy_(source)) for _ in range(3))
    return Device(2 * side**3 / product, 2 * 4 * size / copy)


def _seconds(work: Any) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Costs of one model on one device.

    Args:
        weights: weights multiplied per token.
        weight_bytes: bytes of those weights.
        attention_width: heads times head size, summed over the layers.
        cell_bytes: bytes of one token's keys and values; 0 for an encoder.
    """

    weights: int
    weight_bytes: float
    attention_width: int
    cell_bytes: int


def model_costs(
    config: Mapping[str, Any], cell_bytes: int, *, bytes_per_weight: float = 2, tensor_parallel: int = 1
) -> ModelCosts:
    """Costs of a model from its Hugging Face config.

    Of a mixture of experts, only the experts that one token uses are counted. Raises GeometryError if a size
    is missing.

    Args:
        config: the config as a mapping.
        cell_bytes: `KvGeometry.bytes_per_token`; 0 for an encoder.
        bytes_per_weight: 2 for 16-bit weights.
        tensor_parallel: devices that share the model.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    layers = required(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    hidden = required(text, "hidden_size", "n_embd", "d_model")
    heads = required(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    head = optional(text, "head_dim", "kv_channels") or hidden // heads
    kv_heads = optional(text, "num_key_value_heads", "num_kv_heads") or heads
    inner = optional(text, "moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
    experts = optional(text, "num_experts_per_tok", "num_experts_per_token") or 1
    # Gated feed-forward layers have a third matrix; their configs name SiLU or a gated GELU.
    activation = str(text.get("hidden_act", text.get("activation_function", "")))
    matrices = 3 if activation in ("silu", "swiglu", "geglu", "gelu_pytorch_tanh") else 2
    layer = 2 * hidden * head * (heads + kv_heads) + experts * matrices * hidden * inner
    vocabulary = (optional(text, "vocab_size") or 0) * hidden if cell_bytes else 0
    weights = (layers * layer + vocabulary) // tensor_parallel
    return ModelCosts(
        weights, weights * bytes_per_weight, layers * heads * head // tensor_parallel, cell_bytes
    )


def bytes_per_weight(config: Mapping[str, Any], dtype: str) -> float:
    """Bytes of a weight: those of the quantisation that the config states, otherwise of `dtype`."""
    quantised = config.get("quantization_config") or {}
    bits = quantised.get("bits") or (8 if quantised.get("quant_method") == "fp8" else None)
    return DTYPE_BYTES[dtype] if bits is None else int(bits) / 8


def roofline(device: Device, llm: ModelCosts, embedder: ModelCosts | None = None) -> BatchTime:
    """Step time max(arithmetic, traffic) + overhead of an LLM and an embedding model on one device.

    The sums go over both models, so embedding arithmetic overlaps with the memory traffic of decoding.
    """

    def batch_time(load: StepLoad) -> float:
        operations = traffic = 0.0
        if load.has_llm:
            tokens = load.prefill_tokens + load.decodes
            # Causal attention covers half the squared length; each pair takes 4 operations per unit of width.
            pairs = load.squares / 2 + load.cells
            operations += 2 * llm.weights * tokens + 4 * llm.attention_width * pairs
            traffic += llm.weight_bytes + llm.cell_bytes * (load.cells + tokens)
        if load.inputs and embedder is not None:
            tokens = load.inputs * load.length
            operations += 2 * embedder.weights * tokens + 4 * embedder.attention_width * tokens * load.length
            traffic += embedder.weight_bytes
        if not operations:
            return 0.0
        return max(operations / device.operations, traffic / device.bandwidth) + device.overhead

    return batch_time


def step_cost(batch_time: BatchTime) -> StepCost:
    """Linear step cost through four points of a batch-time model.

    The points are one decode, many decodes, many with long contexts, and one decode with a prompt chunk.
    """
    step = batch_time(StepLoad(decodes=1))
    many = batch_time(StepLoad(decodes=_DECODES))
    cells = _DECODES * _CONTEXT
    long = batch_time(StepLoad(decodes=_DECODES, cells=cells))
    reading = batch_time(StepLoad(decodes=1, prefill_tokens=_CHUNK, squares=_CHUNK**2))
    return StepCost(
        step=step,
        decode=(many - step) / (_DECODES - 1),
        cell=(long - many) / cells,
        prompt_token=(reading - step) / _CHUNK,
    )
