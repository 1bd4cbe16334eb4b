"""Runs a published experiment again and prints the results with the published figures.

`python -m benchmark_control_plane.reproduce NAME`; `--results DIR` writes NAME.json and NAME.png into DIR.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmark_control_plane.common.command_line import BadInput, add_data, print_json
from benchmark_control_plane.round_model.reproductions import (
    apt_adaptive,
    apt_greedy,
    mcsf_prediction_error,
    mcsf_slopes,
    mcsf_synthetic,
    mcsf_table,
)

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
    parser.add_argument("name", help=f"experiment: {', '.join(sorted(TABLES))}")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="folder for NAME.json and NAME.png; without it nothing is written",
    )
    parser.add_argument("--seed", type=int, default=0)
    add_data(parser)
    options = parser.parse_args(arguments)

    def reproduce() -> Mapping[str, Any]:
        if options.name not in TABLES:
            raise BadInput(f"{options.name}: no such experiment; choose one of {', '.join(sorted(TABLES))}")
        if options.data is not None and options.name not in NEED_DATA:
            raise BadInput(f"--data: {options.name} reads no public data; leave the option out")
        data = {"data": options.data} if options.name in NEED_DATA else {}
        with TemporaryDirectory() as scratch:
            found = TABLES[options.name](options.results or Path(scratch), seed=options.seed, **data)
        if options.results is None:
            return found
        return {"written": str(options.results / f"{options.name}.json")}

    return print_json(reproduce)


if __name__ == "__main__":
    sys.exit(main())
