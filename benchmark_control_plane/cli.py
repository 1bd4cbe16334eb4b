"""The commands `tandem bench run | report | compare | gate` and `tandem replay`.

All other modules are imported on use, because `tandem serve` loads this module too.
"""

import argparse
import sys
from pathlib import Path

from benchmark_control_plane.common.command_line import BadInput


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `replay`, and `bench` and its actions, to the sub-parsers of `tandem`."""
    _add_replay(commands)
    text = "run load experiments and compare their results"
    bench = commands.add_parser("bench", help=text, description=text)
    bench.set_defaults(run=run)
    actions = bench.add_subparsers(dest="action", required=True)
    _add_run(actions)
    for name, text, act, paths in _ACTIONS:
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(act=act)
        for path, meaning in paths.items():
            action.add_argument(path, type=Path, help=meaning)


def _add_replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "replay a decision log: check the replay against the log, and predict another configuration"
    replay = commands.add_parser("replay", help=text, description=text)
    replay.set_defaults(run=run, act=_replay)
    replay.add_argument("log", type=Path, help="folder decision_log.dir, or one segment of it")
    replay.add_argument(
        "--config", type=Path, help="YAML file of the other configuration, or a packaged name"
    )
    replay.add_argument("--json", action="store_true", help="print JSON")


def _add_run(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run an experiment and write results.json, requests.jsonl and report.html"
    action = actions.add_parser("run", help=text, description=text)
    action.set_defaults(act=_run)
    action.add_argument("experiment", type=Path, help="YAML file, for example configs/bench/load.yaml")
    action.add_argument("--out", type=Path, required=True, help="output folder")
    action.add_argument("--seeds", type=int, nargs="+", help="replaces the seeds of the experiment")
    action.add_argument("--quick", action="store_true", help="run only two loads, one seed and two systems")
    action.add_argument("--data", type=Path, help="folder of public data sets; default: TANDEM_DATA")


def run(options: argparse.Namespace) -> int:
    """Runs the action.

    Returns 0 if done, 1 for a regression or broken bound, 2 for invalid input, and 3 if a replay does not
    reproduce its log.
    """
    try:
        status: int = options.act(options)
    except ModuleNotFoundError as error:
        print(
            f"tandem bench: {error.name} is not installed; pip install 'tandem-llm[bench]'", file=sys.stderr
        )
        return 2
    except (BadInput, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return status


def _run(options: argparse.Namespace) -> int:
    from benchmark_control_plane.common.servers import interrupt_on_sigterm
    from benchmark_control_plane.judge.run_experiment import run_experiment
    from benchmark_control_plane.report.results_folder import write_page

    interrupt_on_sigterm()
    status = run_experiment(
        options.experiment, options.out, seeds=options.seeds, is_quick=options.quick, data=options.data
    )
    print(write_page(options.out))
    return status


def _replay(options: argparse.Namespace) -> int:
    from benchmark_control_plane.decision_replay.replay_command import replay_log

    return replay_log(options.log, options.config, is_json=options.json)


def _report(options: argparse.Namespace) -> int:
    from benchmark_control_plane.report.results_folder import write_page

    print(write_page(options.results))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from benchmark_control_plane.report.compare import compare_results
    from benchmark_control_plane.report.results_folder import read_results

    comparison = compare_results(read_results(options.a), read_results(options.b))
    print(comparison.text())
    return 1 if comparison.worse else 0


def _gate(options: argparse.Namespace) -> int:
    from benchmark_control_plane.report.regression_bounds import read_bounds, violations
    from benchmark_control_plane.report.results_folder import read_results

    bounds = read_bounds(options.bounds)
    complaints = list(violations(read_results(options.report), bounds))
    print("\n".join(complaints) or f"{len(bounds)} bounds hold")
    return 1 if complaints else 0


_ACTIONS = (
    (
        "report",
        "write the HTML report next to the results",
        _report,
        {"results": "folder written by `run --out`, or a results file"},
    ),
    (
        "compare",
        "compare B with A, paired by system, load and seed; exit status 1 if B is worse",
        _compare,
        {"a": "folder or results.json", "b": "folder or results.json of the later run"},
    ),
    (
        "gate",
        "check results against bounds; print each broken bound, exit status 1 if there is one",
        _gate,
        {"report": "folder or results.json", "bounds": "YAML file such as configs/bench/gate-example.yaml"},
    ),
)
