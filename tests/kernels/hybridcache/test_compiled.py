import json

import pytest

from benchmark_control_plane import kernel_figures

pytest.importorskip("triton", reason="needs Triton: the hybrid extra")

from hybridcache import compiled

# What one program may have at most: CUDA C++ programming guide, table of compute capabilities.
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10}


@pytest.mark.parametrize("capability", compiled.CAPABILITIES)
def test_restoring_compiles_without_a_gpu_and_spills_nothing(capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = compiled.measure(compiled.MODELS["Llama-2-7B"]["restore"], capability)
    assert found.spilled_bytes == 0
    # 65,536 registers of a processor must do for at least one program.
    assert 0 < found.registers * 32 * found.warps <= 1 << 16
    assert found.shared_bytes <= SHARED_BYTES[f"sm_{capability}"]


def test_the_kept_figures_cover_every_kernel_and_none_spills():
    kept = json.loads(kernel_figures.RESULTS.read_text(encoding="utf-8"))["kernels"]
    assert set(kept) == set(SHARED_BYTES)
    for capability, models in kept.items():
        assert {model: set(kernels) for model, kernels in models.items()} == {
            model: set(variants) for model, variants in compiled.MODELS.items()
        }
        figures = [row for kernels in models.values() for row in kernels.values()]
        assert {row["spilled_bytes"] for row in figures} == {0}
        assert max(row["shared_bytes"] for row in figures) <= SHARED_BYTES[capability]
