"""Checks the resources of all kernels that `make kernels` has compiled and stored."""

import json

import pytest

from benchmark_control_plane.common.results_file import PUBLISHED

pytest.importorskip("triton", reason="needs Triton: the hybrid extra")

from hybridcache import compiled

# Limit per program: CUDA C++ programming guide, table of compute capabilities.
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10}


def test_the_stored_figures_cover_every_kernel_and_none_spills():
    kept = json.loads((PUBLISHED / "kernel-figures.json").read_text(encoding="utf-8"))["kernels"]
    assert set(kept) == set(SHARED_BYTES)
    for capability, models in kept.items():
        assert {model: set(kernels) for model, kernels in models.items()} == {
            model: set(variants) for model, variants in compiled.MODELS.items()
        }
        figures = [row for kernels in models.values() for row in kernels.values()]
        assert {row["spilled_bytes"] for row in figures} == {0}
        # The 65,536 registers of a multiprocessor must suffice for at least one program.
        assert max(row["registers"] * 32 * row["warps"] for row in figures) <= 1 << 16
        assert max(row["shared_bytes"] for row in figures) <= SHARED_BYTES[capability]
