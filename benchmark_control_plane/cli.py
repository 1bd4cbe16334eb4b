"""The commands `tandem bench ...`: run an experiment, show results, compare two, hold one to bounds.

Nothing is imported before it is needed: `tandem serve` carries this module too.
"""

import argparse
import sys
from pathlib import Path

from benchmark_control_plane.common.arguments import BadInput


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "measure against objectives, and compare"
    bench = commands.add_parser("bench", help=text, description=text)
    bench.set_defaults(run=run)
    actions = bench.add_subparsers(dest="action", required=True)
    _add_run(actions)
    for name, text, act, paths in _ACTIONS:
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(act=act)
        for path, meaning in paths.items():
            action.add_argument(path, type=Path, help=meaning)


def _add_run(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run an experiment: results.json, requests.jsonl and report.html"
    action = actions.add_parser("run", help=text, description=text)
    action.set_defaults(act=_run)
    action.add_argument("experiment", type=Path, help="YAML file, for example configs/bench/load.yaml")
    action.add_argument("--out", type=Path, required=True, help="folder for what is found")
    action.add_argument("--seeds", type=int, nargs="+", help="instead of the experiment's")
    action.add_argument("--quick", action="store_true", help="two loads, one seed, two systems")
    action.add_argument("--data", type=Path, help="folder of public data; default TANDEM_DATA")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 done, 1 something got worse or broke a bound, 2 the input is wrong."""
    try:
        status: int = options.act(options)
    except (BadInput, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return status


def _run(options: argparse.Namespace) -> int:
    from benchmark_control_plane.common.servers import stop_as_interrupted
    from benchmark_control_plane.judge.run import run_experiment
    from benchmark_control_plane.report.results_folder import write_page

    stop_as_interrupted()
    status = run_experiment(
        options.experiment, options.out, seeds=options.seeds, is_quick=options.quick, data=options.data
    )
    print(write_page(options.out))
    return status


def _report(options: argparse.Namespace) -> int:
    from benchmark_control_plane.report.results_folder import write_page

    print(write_page(options.results))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from benchmark_control_plane.report.compare import compared
    from benchmark_control_plane.report.results_folder import read_results

    comparison = compared(read_results(options.a), read_results(options.b))
    print(comparison.text())
    return 1 if comparison.worse else 0


def _gate(options: argparse.Namespace) -> int:
    from benchmark_control_plane.report.gate import broken, read_bounds
    from benchmark_control_plane.report.results_folder import read_results

    bounds = read_bounds(options.bounds)
    complaints = list(broken(read_results(options.report), bounds))
    print("\n".join(complaints) or f"{len(bounds)} bounds hold")
    return 1 if complaints else 0


_ACTIONS = (
    (
        "report",
        "write the page of results beside them",
        _report,
        {"results": "folder that `run --out` wrote, or one file of results"},
    ),
    (
        "compare",
        "say what changed from A to B, paired by system, load and seed; 1 if B is worse",
        _compare,
        {"a": "folder or results.json", "b": "the same, of the later run"},
    ),
    (
        "gate",
        "hold results to bounds: one line for each that is broken, and 1",
        _gate,
        {"report": "folder or results.json", "bounds": "YAML file, as configs/bench/gate-example.yaml"},
    ),
)
