"""What would each kernel of the hybrid cache take on an A100 and an H100? Compiled here, without either.

    python -m benchmark_control_plane.experiments.hidden_cache.kernel_figures [--check]

With `--check` nothing is written; what spills, or became other than what is kept, is told.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmark_control_plane.common.arguments import read_object
from benchmark_control_plane.common.results_file import PUBLISHED, add_results, write_or_print

Kept = Mapping[str, Any]
"""`triton`, its version; `kernels`, figures by capability, model and name."""


def problems(found: Kept, kept: Kept) -> Iterator[str]:
    """Registers are compared only where the same Triton counted them."""
    before = dict(_rows(kept)) if found["triton"] == kept["triton"] else {}
    for where, figures in _rows(found):
        if figures["spilled_bytes"]:
            yield f"{where}: {figures['spilled_bytes']} bytes spilled; give it a smaller tile in launch.py"
        if before and before.get(where) != figures:
            yield f"{where}: {figures}, kept are {before.get(where)}; if that is meant, run without --check"


def _rows(figures: Kept) -> Iterator[tuple[str, Mapping[str, int]]]:
    for capability, models in figures["kernels"].items():
        for model, kernels in models.items():
            for name, row in kernels.items():
                yield f"{capability} {model} {name}", row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark_control_plane.experiments.hidden_cache.kernel_figures", description=__doc__
    )
    add_results(parser)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if something is not as kept")
    options = parser.parse_args(arguments)
    # Needs Triton, which only the extra `hybrid` brings.
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
        told = list(problems(found, read_object(str(options.results or PUBLISHED / "kernel-figures.json"))))
        print(*told, sep="\n", end="\n" if told else "", file=sys.stderr)
        return int(bool(told))
    write_or_print(options.results, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
