"""Measures registers, spills and shared memory of the hybrid-cache kernels, compiled for an A100 and an H100.

    python -m benchmark_control_plane.experiments.hidden_cache.kernel_figures [--check]

Needs no GPU. `--check` writes nothing and reports kernels that spill or differ from the committed figures.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmark_control_plane.common.command_line import exit_status, read_object
from benchmark_control_plane.common.results_file import PUBLISHED, add_results, write_or_print

KernelFigures = Mapping[str, Any]
"""`triton`, its version; `kernels`, figures by capability, model and name."""


def problems(found: KernelFigures, committed: KernelFigures) -> Iterator[str]:
    """Kernels that spill, and with the same version of Triton those that differ from the committed ones."""
    before = dict(_rows(committed)) if found["triton"] == committed["triton"] else {}
    for where, figures in _rows(found):
        if figures["spilled_bytes"]:
            yield f"{where}: {figures['spilled_bytes']} bytes spilled; use a smaller tile in launch.py"
        if before and before.get(where) != figures:
            yield f"{where}: {figures}, committed are {before.get(where)}; if intended, run without --check"


def _rows(figures: KernelFigures) -> Iterator[tuple[str, Mapping[str, int]]]:
    for capability, models in figures["kernels"].items():
        for model, kernels in models.items():
            for name, row in kernels.items():
                yield f"{capability} {model} {name}", row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark_control_plane.experiments.hidden_cache.kernel_figures", description=__doc__
    )
    add_results(parser)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a kernel spills or differs"
    )
    options = parser.parse_args(arguments)
    # Triton is in the extra `hybrid` only.
    import triton
    from hybridcache.compiled import measure_all

    kernels: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    for capability, model, name, figures in measure_all():
        kernels.setdefault(capability, {}).setdefault(model, {})[name] = figures
        print(
            f"{capability} {model:10} {name:14} {figures['registers']:3} registers, "
            f"{figures['spilled_bytes']} bytes spilled, {figures['shared_bytes'] / 1024:.0f} KiB shared",
            flush=True,
        )
    found: dict[str, Any] = {"triton": triton.__version__, "kernels": kernels}
    if options.check:
        complaints = list(
            problems(found, read_object(str(options.results or PUBLISHED / "kernel-figures.json")))
        )
        print(*complaints, sep="\n", end="\n" if complaints else "", file=sys.stderr)
        return int(bool(complaints))
    write_or_print(options.results, found)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
