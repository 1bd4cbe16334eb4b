"""Compiles the kernels ahead of time for A100 and H100, and reads their register and memory use.

Triton compiles for any compute capability without a GPU, and includes the tool that reports the resources of
a thread. The shapes are OPT-13B's (no rotation, biases) and Llama-2-7B's (rotation, no biases), in bfloat16.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hybridcache.jit import attention as jit_attention
from hybridcache.jit import projection as jit_projection
from hybridcache.jit import rows as jit_rows
from hybridcache.launch import DECODE, GATHER, MIX, RESTORE, SCATTER, SCORES, Tile, padded

CAPABILITIES = (80, 90)

_BLOCK_TOKENS = 16
_ROWS = 2 * _BLOCK_TOKENS
_HEAD_DIM = 128

# Types by parameter name; all other parameters are pointers to the cache's dtype or 32-bit counts.
_TYPES = {
    "slots": "*i64", "tables": "*i32", "into": "*i32", "lengths": "*i32", "starts": "*i32",
    "cos": "*fp32", "sin": "*fp32", "scores": "*fp32", "logsum": "*fp32", "parts": "*fp32", "scale": "fp32",
    "block_stride": "i64", "key_block_stride": "i64", "value_block_stride": "i64",
}  # fmt: skip
_COUNTS = frozenset({"D", "splits", "longest"})


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of a kernel: registers and spilled bytes per thread, shared memory and warps per program.

    No kernel uses local arrays, so a thread's stack is what was spilled from its registers.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with compile-time constants and a tile."""

    kernel: Any
    constants: Mapping[str, int | bool]
    tile: Tile

    def source(self) -> ASTSource:
        """The kernel's source with the types and alignments of an actual launch."""
        names = self.kernel.arg_names
        signature = {name: self._kind(name) for name in names}
        # As in every launch: torch tensors and their rows are aligned to 16 bytes.
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if signature[name].startswith("*") or name == "D" or name.endswith("_stride")
        }
        constants = {(names.index(name),): value for name, value in self.constants.items()}
        return ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=aligned)

    def _kind(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        counted = name in _COUNTS or name.endswith("_stride")
        return _TYPES.get(name) or ("i32" if counted else "*bf16")


_KERNELS: dict[str, tuple[Any, Tile]] = {
    "scatter_rows": (jit_rows.scatter_rows, SCATTER),
    "gather_rows": (jit_rows.gather_rows, GATHER),
    "restore": (jit_projection.restore, RESTORE),
    "rotated_scores": (jit_projection.rotated_scores, RESTORE),
    "paged_decode": (jit_attention.paged_decode, DECODE),
    "hidden_scores": (jit_attention.hidden_scores, SCORES),
    "mix_rows": (jit_attention.mix_rows, MIX),
}


def _variants(heads: int, *, rotated: bool, bias: bool) -> dict[str, Variant]:
    shape = {
        "HEADS": heads, "HEADS_PADDED": padded(heads), "HEAD_DIM": _HEAD_DIM, "HEAD_PADDED": _HEAD_DIM,
        "HALF": _HEAD_DIM // 2 if rotated else 0, "PAIRS": padded(_HEAD_DIM // 2),
        "ROWS": _ROWS, "ROWS_PADDED": _ROWS, "BLOCK_TOKENS": _BLOCK_TOKENS,
        "BIAS": bias, "KEY_BIAS": bias, "VALUE_BIAS": bias,
    }  # fmt: skip
    found = {}
    for name, (kernel, tile) in _KERNELS.items():
        tiled = {"BLOCK_M": tile.across, "BLOCK_N": tile.across, "BLOCK_K": tile.along, "BLOCK_D": tile.along}
        constants = {key: value for key, value in (shape | tiled).items() if key in kernel.arg_names}
        found[name] = Variant(kernel, constants, tile)
    return found


MODELS: dict[str, dict[str, Variant]] = {
    "OPT-13B": _variants(40, rotated=False, bias=True),
    "Llama-2-7B": _variants(32, rotated=True, bias=False),
}


def measure(variant: Variant, capability: int) -> KernelResources:
    """Compiles a variant for a compute capability (80 is 8.0) and returns its resources."""
    options = {"num_warps": variant.tile.warps, "enable_fp_fusion": True}
    made = triton.compile(variant.source(), target=GPUTarget("cuda", capability, 32), options=options)
    report = _resources(made.asm["cubin"])
    return KernelResources(
        registers=_number(r"REG:(\d+)", report),
        spilled_bytes=_number(r"STACK:(\d+)", report),
        shared_bytes=made.metadata.shared,
        warps=variant.tile.warps,
    )


def measure_all() -> Iterator[tuple[str, str, str, dict[str, int]]]:
    """Yields (compute capability, model, kernel, resources) of all variants."""
    for capability in CAPABILITIES:
        for model, variants in MODELS.items():
            for name, variant in variants.items():
                yield f"sm_{capability}", model, name, asdict(measure(variant, capability))


def _resources(program: bytes) -> str:
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program)
        file.flush()
        command = [str(reader), "--dump-resource-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _number(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    if found is None:
        raise RuntimeError(f"cuobjdump output {report!r} does not match {pattern!r}; upgrade Triton")
    return int(found[1])
