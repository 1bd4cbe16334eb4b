"""Do the published tables come out again? `python -m benchmark_control_plane.reproduce NAME`.

Prints ours beside the published figures and writes NAME.json and NAME.png into `results/`.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark_control_plane.inputs import BadInput, exit_code
from benchmark_control_plane.reproductions import (
    apt_adaptive,
    apt_greedy,
    mcsf_prediction_error,
    mcsf_slopes,
    mcsf_synthetic,
    mcsf_table,
)

RESULTS = Path(__file__).parent / "results"

TABLES: Mapping[str, Callable[..., Mapping[str, Any]]] = {
    "apt-adaptive": apt_adaptive.run,
    "apt-greedy": apt_greedy.run,
    "mcsf-prediction-error": mcsf_prediction_error.run,
    "mcsf-slopes": mcsf_slopes.run,
    "mcsf-synthetic": mcsf_synthetic.run,
    "mcsf-table": mcsf_table.run,
}
NEED_DATA = ("apt-adaptive",)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark_control_plane.reproduce", description=__doc__)
    parser.add_argument("name", help=", ".join(sorted(TABLES)))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder of public data; default TANDEM_DATA")
    options = parser.parse_args(arguments)

    def written() -> dict[str, str]:
        if options.name not in TABLES:
            raise BadInput(f"{options.name}: no such table; choose one of {', '.join(sorted(TABLES))}")
        if options.data is not None and options.name not in NEED_DATA:
            raise BadInput(f"--data: {options.name} reads none; leave it out")
        data = {"data": options.data} if options.name in NEED_DATA else {}
        TABLES[options.name](options.results, seed=options.seed, **data)
        return {"written": str(options.results / f"{options.name}.json")}

    return exit_code(written)


if __name__ == "__main__":
    sys.exit(main())
