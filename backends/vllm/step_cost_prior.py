"""Reads the KV-cache geometry from vLLM's config, and predicts the step cost from a roofline.

Importing this module imports vLLM, which takes seconds.
"""

import logging
from typing import Any

from vllm.platforms import current_platform

from backends.cost_models.roofline import (
    Device,
    bytes_per_weight,
    gpu_by_name,
    measure_cpu,
    model_costs,
    roofline,
    step_cost,
)
from controlplane.core.engine_reports import StepCost
from controlplane.core.kv_geometry import GeometryError, KvGeometry, kv_geometry

log = logging.getLogger(__name__)


def geometry_of(config: Any) -> KvGeometry:
    """The KV-cache geometry of a vLLM config. Raises GeometryError."""
    model, cache, ranks = config.model_config, config.cache_config, config.parallel_config
    # vLLM has resolved the dtype, which the checkpoint's config alone may not state.
    dtype = str(model.dtype).removeprefix("torch.") if cache.cache_dtype == "auto" else cache.cache_dtype
    return kv_geometry(
        model.hf_config.to_dict(),
        block_tokens=cache.block_size,
        cache_dtype=dtype,
        tensor_parallel=ranks.tensor_parallel_size,
        pipeline_parallel=ranks.pipeline_parallel_size,
    )


def step_cost_prior(config: Any, geometry: KvGeometry) -> StepCost | None:
    """Roofline step cost; None if figures of the device or model are unknown, or if no model runs."""
    model = config.model_config
    if "tandem_sim" in (config.additional_config or {}):
        return None
    dtype = str(model.dtype).removeprefix("torch.")
    device = _device(dtype)
    if device is None:
        return None
    described = model.hf_config.to_dict()
    try:
        known = model_costs(
            described,
            # A step passes through all stages, one after the other.
            geometry.bytes_per_token * config.parallel_config.pipeline_parallel_size,
            bytes_per_weight=bytes_per_weight(described, dtype),
            tensor_parallel=config.parallel_config.tensor_parallel_size,
        )
    except GeometryError as error:
        log.info("step times have no prior and are learned from measured steps: %s", error)
        return None
    return step_cost(roofline(device, known))


def _device(dtype: str) -> Device | None:
    if current_platform.is_cpu():
        return measure_cpu(dtype)
    name = current_platform.get_device_name()
    if (device := gpu_by_name(name)) is None:
        log.info("step times have no prior and are learned from measured steps: device %s is unknown", name)
    return device
