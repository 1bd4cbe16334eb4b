"""The commands `tandem bench`, `capacity`, `fleet plan`, `replay` and `tune`.

All other modules are imported on use, because `tandem serve` loads this module too.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from benchmark_control_plane.common.command_line import BadInput, add_data
from controlplane.config import ConfigError

_EXTRAS = {"optuna": "tune", "numba": "research"}


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `capacity`, `replay`, `tune`, and `bench` with its actions, to the sub-parsers of `tandem`.

    `fleet`, which is among them already, gets the action `plan`.
    """
    _add_capacity(commands)
    _add_fleet_plan(commands)
    _add_replay(commands)
    _add_tune(commands)
    text = "run load experiments and compare their results"
    bench = commands.add_parser("bench", help=text, description=_sentence(text))
    bench.set_defaults(run=run)
    actions = bench.add_subparsers(dest="action", required=True)
    _add_run(actions)
    _add_bound(actions)
    for name, text, act, paths in _ACTIONS:
        action = actions.add_parser(name, help=text, description=_sentence(text))
        action.set_defaults(act=act)
        action.add_argument("--json", action="store_true", help="print the result as JSON")
        for path, meaning in paths.items():
            action.add_argument(path, type=Path, help=meaning)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _add_capacity(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "find the highest rate of a workload that a configuration sustains, and what limits it"
    command = commands.add_parser("capacity", help=text, description=_sentence(text))
    command.set_defaults(run=run, act=_capacity)
    command.add_argument("config", type=Path, help="YAML file, or a packaged name: dev, colocated")
    _add_workload(command)


def _add_fleet_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    fleet = commands.choices["fleet"]
    actions = next(each for each in fleet._actions if isinstance(each, argparse._SubParsersAction))
    text = "find how many boxes of each kind a demand needs, and what limits them; needs the extra [bench]"
    command = actions.add_parser("plan", help=text, description=_sentence(text))
    command.set_defaults(run=run, act=_plan_fleet)
    command.add_argument("file", type=Path, help="YAML file as for `tandem fleet serve`; `boxes` is not read")
    command.add_argument(
        "--rate", type=_rate,
        help="requests per second of the whole workload; default: the busiest five minutes of the log",
    )  # fmt: skip
    command.add_argument(
        "--utilisation", type=float, default=0.8,
        help="the most of its capacity that a box may be given; default: %(default)s",
    )  # fmt: skip
    _add_workload(command)


def _rate(given: str) -> float:
    try:
        rate = float(given)
    except ValueError:
        rate = 0.0
    if not 0 < rate < inf:
        raise argparse.ArgumentTypeError(f"{given}: should be a number above 0")
    return rate


def _add_workload(command: argparse.ArgumentParser) -> None:
    """Adds the options of a workload and its simulation."""
    command.add_argument(
        "--workload", required=True,
        help="YAML file with `streams` as in an experiment, the streams in braces, or a decision log",
    )  # fmt: skip
    command.add_argument(
        "--attainment", type=float, default=0.9,
        help="share of requests that must meet their objectives; default: %(default)s",
    )  # fmt: skip
    command.add_argument(
        "--device",
        help="roofline, and memory where `pool.memory` is auto, of this device, for example h100-80; "
        "default: the one at hand",
    )
    command.add_argument(
        "--step", type=_numbers(4), metavar="BASE,PROMPT,DECODE,CELL",
        help="measured seconds of an engine step, and more per prompt token, decoding request and KV cell",
    )  # fmt: skip
    command.add_argument(
        "--embedding", type=_numbers(2), metavar="BASE,TOKEN",
        help="measured seconds of an embedding pass, and more per padded token",
    )  # fmt: skip
    command.add_argument(
        "--requests", type=int, default=2_000, help="requests of each simulated rate; default: %(default)s"
    )
    command.add_argument(
        "--steps", type=int, default=3, help="bisections after the first rates; default: %(default)s"
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the workload; default: %(default)s")
    add_data(command)
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _numbers(count: int) -> Callable[[str], tuple[float, ...]]:
    """A parser of so many numbers of at least 0, not all of them 0, with commas between them."""

    def parsed(given: str) -> tuple[float, ...]:
        try:
            found = tuple(float(part) for part in given.split(","))
        except ValueError:
            found = ()
        if len(found) != count or not all(0 <= number < inf for number in found) or not any(found):
            raise argparse.ArgumentTypeError(
                f"{given}: should be {count} numbers of at least 0, not all of them 0, such as 0.003,4e-6"
            )
        return found

    return parsed


def _add_replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "replay a decision log: check the replay against the log, and predict another configuration"
    replay = commands.add_parser("replay", help=text, description=_sentence(text))
    replay.set_defaults(run=run, act=_replay)
    replay.add_argument("log", type=Path, help="folder decision_log.dir, or one segment of it")
    replay.add_argument(
        "--config", type=Path, help="YAML file of the other configuration, or a packaged name"
    )
    replay.add_argument("--json", action="store_true", help="print JSON")


def _add_tune(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "search for a better configuration for the traffic of a decision log, and write it with reasons"
    tune = commands.add_parser("tune", help=text, description=_sentence(text))
    tune.set_defaults(run=run, act=_tune)
    tune.add_argument("log", type=Path, help="folder decision_log.dir, or one segment of it")
    tune.add_argument("config", type=Path, help="YAML file to improve, or a packaged name")
    tune.add_argument(
        "--out", type=Path, required=True,
        help="YAML file to write if something better is found; the page and the state are written next to it",
    )  # fmt: skip
    tune.add_argument(
        "--minutes", type=float, default=10.0,
        help="time of the whole command; what it does not suffice for is left out; default: %(default)g",
    )  # fmt: skip
    tune.add_argument("--trials", type=int, default=400, help="trials at most; default: %(default)s")
    tune.add_argument(
        "--processes",
        type=int,
        default=min(256, os.cpu_count() or 1),
        help="replays at a time; default: one per core",
    )
    tune.add_argument(
        "--also", action="append", default=[], metavar="KEY",
        help="also change classes.NAME.priority or classes.NAME.weight; may be repeated",
    )  # fmt: skip
    tune.add_argument(
        "--keep", action="append", default=[], metavar="KEY",
        help="do not change this key; may be repeated",
    )  # fmt: skip
    tune.add_argument("--json", action="store_true", help="print JSON")


def _add_run(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = (
        "run an experiment and write results.json, requests.jsonl and report.html; of a fleet study NAME.json"
    )
    action = actions.add_parser("run", help=text, description=_sentence(text))
    action.set_defaults(act=_run)
    action.add_argument("experiment", type=Path, help="YAML file, for example configs/bench/load.yaml")
    action.add_argument("--out", type=Path, required=True, help="output folder")
    action.add_argument("--seeds", type=int, nargs="+", help="replaces the seeds of the experiment")
    action.add_argument(
        "--quick", action="store_true",
        help="run only two loads, one seed and two systems; of a fleet study the ends of its axes",
    )  # fmt: skip
    action.add_argument(
        "--resume", action="store_true",
        help="keep the runs in --out with their objectives and capacity, and measure only what is missing",
    )  # fmt: skip
    add_data(action)
    action.add_argument("--json", action="store_true", help="print the written files as JSON")


def _add_bound(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "add to results what a schedule with hindsight could attain, without running the systems again"
    action = actions.add_parser("bound", help=text, description=_sentence(text))
    action.set_defaults(act=_bound)
    action.add_argument("results", type=Path, help="folder written by `run --out`, or a results file")
    add_data(action)
    action.add_argument("--json", action="store_true", help="print the result as JSON")


def run(options: argparse.Namespace) -> int:
    """Runs the action; returns its exit status, one of `ExitStatus`."""
    try:
        status: int = options.act(options)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.startswith("benchmark_control_plane"):
            print(
                f"tandem: {missing} is no part of the package; run a clone of the repository", file=sys.stderr
            )
            return 2
        extra = _EXTRAS.get(missing, "bench")
        remedy = f"it is in Tandem's extra '{extra}'; in a clone: pip install '.[{extra}]'"
        print(f"tandem: {missing} is not installed; {remedy}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `tandem` ends without an error where the reader has closed its output.
        raise
    except (BadInput, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        file = error.filename
        text = f"{file}: {error.strerror}; check the path and its permissions" if file else str(error)
        print(text, file=sys.stderr)
        return 2
    return status


def _run(options: argparse.Namespace) -> int:
    from benchmark_control_plane.common.servers import interrupt_on_sigterm
    from benchmark_control_plane.judge.experiment_file import read_extended
    from benchmark_control_plane.judge.run_experiment import run_experiment
    from benchmark_control_plane.report.matrix_results import cell_folders
    from benchmark_control_plane.report.results_folder import write_page

    content, _ = read_extended(options.experiment)
    if isinstance(content, dict) and "study" in content:
        if options.resume:
            raise BadInput(f"{options.experiment}: a fleet study takes minutes; leave out --resume")
        return _run_study(options)
    interrupt_on_sigterm()
    status = run_experiment(
        options.experiment, options.out, seeds=options.seeds, is_quick=options.quick,
        is_resumed=options.resume, data=options.data,
    )  # fmt: skip
    pages = [write_page(folder) for folder in cell_folders(options.out) or [options.out]]
    _print_pages(pages, is_json=options.json)
    return status


def _run_study(options: argparse.Namespace) -> int:
    from benchmark_control_plane.fleet_studies.run_study import run_study

    file = run_study(
        options.experiment, options.out, seeds=options.seeds, is_quick=options.quick, data=options.data
    )
    _print_pages([file], is_json=options.json)
    return 0


def _capacity(options: argparse.Namespace) -> int:
    from benchmark_control_plane.capacity.command import capacity

    return capacity(options)


def _plan_fleet(options: argparse.Namespace) -> int:
    from benchmark_control_plane.capacity.fleet_plan import plan_fleet

    return plan_fleet(options)


def _replay(options: argparse.Namespace) -> int:
    from benchmark_control_plane.decision_replay.replay_command import replay_log

    return replay_log(options.log, options.config, is_json=options.json)


def _tune(options: argparse.Namespace) -> int:
    from benchmark_control_plane.tuning.tune_command import tune

    return tune(options)


def _report(options: argparse.Namespace) -> int:
    from benchmark_control_plane.report.results_folder import write_page

    _print_pages([write_page(options.results)], is_json=options.json)
    return 0


def _print_pages(pages: Sequence[Path], *, is_json: bool) -> None:
    if is_json:
        print(json.dumps({"reports": list(map(str, pages))}, indent=1))
    else:
        print(*pages, sep="\n")


def _bound(options: argparse.Namespace) -> int:
    from benchmark_control_plane.judge.hindsight.add_bounds import add_bounds
    from benchmark_control_plane.report.results_folder import read_results, replace_results

    results, bounded = add_bounds(read_results(options.results), options.data)
    file = replace_results(options.results, results)
    runs = len(results["runs"])
    if options.json:
        print(json.dumps({"file": str(file), "runs": runs, "bounded": bounded}, indent=1))
    else:
        print(f"{bounded} of {runs} runs have a bound in {file}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from benchmark_control_plane.report.compare import compare_results
    from benchmark_control_plane.report.results_folder import read_results

    comparison = compare_results(read_results(options.a), read_results(options.b))
    print(json.dumps(comparison.facts(), indent=1) if options.json else comparison.text())
    return 1 if comparison.worse else 0


def _gate(options: argparse.Namespace) -> int:
    from benchmark_control_plane.report.regression_bounds import read_bounds, violations
    from benchmark_control_plane.report.results_folder import read_results

    bounds = read_bounds(options.bounds)
    complaints = list(violations(read_results(options.report), bounds))
    if options.json:
        print(json.dumps({"bounds": len(bounds), "broken": complaints}, indent=1))
    else:
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
