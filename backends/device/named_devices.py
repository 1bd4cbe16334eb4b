"""Devices that a configuration can be planned for without having one: memory and roofline by a short name.

The memory is the size on the data sheet in units of 10^9 bytes, which is below what the drivers report. The
roofline is the one of `backends.cost_models.roofline`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from backends.cost_models.roofline import Device, gpu_by_name


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """A GPU by the driver's name, and its memory in units of 10^9 bytes."""

    driver_name: str
    gigabytes: int

    @property
    def roofline(self) -> Device:
        """Arithmetic and bandwidth of the device."""
        device = gpu_by_name(self.driver_name)
        assert device is not None, self.driver_name
        return device

    @property
    def has_bfloat16(self) -> bool:
        """Whether the device computes in bfloat16; those before NVIDIA's Ampere do not."""
        return self.driver_name not in ("V100", "T4")


NAMED_DEVICES: Mapping[str, NamedDevice] = {
    "b200-180": NamedDevice("B200", 180),
    "gh200-96": NamedDevice("GH200", 96),
    "h200-141": NamedDevice("H200", 141),
    "h100-80": NamedDevice("H100", 80),
    "h100-pcie-80": NamedDevice("H100 PCIe", 80),
    "h100-nvl-94": NamedDevice("H100 NVL", 94),
    "a100-80": NamedDevice("A100", 80),
    "a100-pcie-80": NamedDevice("A100 PCIe 80GB", 80),
    "a100-40": NamedDevice("A100 40GB", 40),
    "a40-48": NamedDevice("A40", 48),
    "a30-24": NamedDevice("A30", 24),
    "a10g-24": NamedDevice("A10G", 24),
    "a10-24": NamedDevice("A10", 24),
    "l40s-48": NamedDevice("L40S", 48),
    "l40-48": NamedDevice("L40", 48),
    "l4-24": NamedDevice("L4", 24),
    "rtx-a6000-48": NamedDevice("RTX A6000", 48),
    "rtx-4090-24": NamedDevice("RTX 4090", 24),
    "rtx-3090-24": NamedDevice("RTX 3090", 24),
    "v100-16": NamedDevice("V100", 16),
    "v100-32": NamedDevice("V100", 32),
    "t4-16": NamedDevice("T4", 16),
    "mi300x-192": NamedDevice("MI300X", 192),
}


def named_device(name: str) -> NamedDevice:
    """The device of a short name. Raises ValueError listing the names."""
    if name not in NAMED_DEVICES:
        raise ValueError(f"--device {name}: unknown; choose one of {', '.join(NAMED_DEVICES)}")
    return NAMED_DEVICES[name]
