"""What would each kernel of the hybrid cache take on an A100 and an H100? Compiled here, without either.

python -m benchmark_control_plane.kernel_figures
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "kernel-figures.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark_control_plane.kernel_figures", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
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
    options.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
