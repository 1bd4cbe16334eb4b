"""Measures what 1,000 cached tokens add to a decode step, as keys and values or as hidden states.

    python -m benchmark_control_plane.experiments.hidden_cache.decode_cost

On CUDA the Triton kernels run at OPT-13B's shapes in bfloat16, elsewhere the references at OPT-125M's in
float32 on one thread. `bandwidth` is the number of bytes that a form must move over its time, next to that
of a plain copy. The time is that of the attention of all layers; the rest of a model's step is the same in
every form.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.results_file import add_results, write_or_print

# Bytes that a form moves per token and layer, in units of one hidden state. On these models keys and values
# are two units; M0 reads one, writes two and reads them; M1 and M2 pass twice over the rows.
MOVED = {"kv": 2, "m0": 5, "m1": 2, "m2": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention shape of a model."""

    layers: int
    heads: int
    head_dim: int
    rotary: bool


SHAPES = {
    "OPT-125M": Shape(12, 12, 64, rotary=False),
    "OPT-13B": Shape(40, 40, 128, rotary=False),
    "Llama-2-7B": Shape(32, 32, 128, rotary=True),
}


def measure(name: str) -> dict[str, Any]:
    """Report for one model of SHAPES on this machine's device."""
    # Imported here, so that SHAPES and MOVED can be imported without torch.
    import torch
    from hybridcache.calibration import CalibrationSetup, copy_bandwidth
    from hybridcache.calibration import measure as measure_forms
    from hybridcache.layout import BlockLayout

    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    shape = SHAPES[name]
    setup = CalibrationSetup(
        layout=BlockLayout(16, shape.heads, shape.head_dim, shape.heads * shape.head_dim),
        dtype=torch.bfloat16 if on_cuda else torch.float32,
        device=device,
        requests=32 if on_cuda else 4,
        contexts=range(256, 2049, 256) if on_cuda else range(64, 513, 64),
        repeats=20 if on_cuda else 9,
        rotary=shape.rotary,
        flushed_bytes=2 << 30 if on_cuda else 0,
    )
    copied = copy_bandwidth(device, megabytes=1024 if on_cuda else 128, repeats=setup.repeats)
    row_bytes = setup.layout.hidden_size * setup.dtype.itemsize
    forms = {}
    for form, cost in measure_forms(setup).items():
        reached = MOVED[form] * row_bytes / cost.seconds_per_token
        forms[form] = {
            "ms_per_1000_tokens": cost.seconds_per_token * 1e6 * shape.layers,
            "ms_per_request": cost.seconds_per_request * 1e3 * shape.layers,
            "bandwidth_gb_s": reached / 1e9,
            "share_of_copy": reached / copied,
            "layer_ms": [seconds * 1e3 for seconds in cost.seconds],
        }
    return {
        "device": torch.cuda.get_device_name() if on_cuda else _processor(),
        "model": name,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "requests": setup.requests,
        "contexts": list(setup.contexts),
        "copy_gb_s": copied / 1e9,
        "forms": forms,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"CPU {found[1]}" if found else "CPU"


def main(arguments: Sequence[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(
        prog="benchmark_control_plane.experiments.hidden_cache.decode_cost", description=__doc__
    )
    default = "OPT-13B" if torch.cuda.is_available() else "OPT-125M"
    parser.add_argument("--model", choices=sorted(SHAPES), default=default)
    add_results(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = measure(options.model)
    print(f"{found['device']}, {found['model']} in {found['dtype']}, copies {found['copy_gb_s']:.0f} GB/s")
    for form, row in found["forms"].items():
        print(
            f"{form}: {row['ms_per_1000_tokens']:8.3f} ms per 1,000 tokens, "
            f"{row['ms_per_request']:6.3f} ms per request, {row['bandwidth_gb_s']:6.1f} GB/s "
            f"({row['share_of_copy']:.0%} of a copy)"
        )
    write_or_print(options.results, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
