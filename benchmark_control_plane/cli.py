"""The commands `tandem bench run | report | compare | gate`, `tandem capacity` and `tandem replay`.

All other modules are imported on use, because `tandem serve` loads this module too.
"""

import argparse
import json
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path

from benchmark_control_plane.common.command_line import BadInput
from controlplane.config import ConfigError


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `capacity`, `replay`, and `bench` with its actions, to the sub-parsers of `tandem`."""
    _add_capacity(commands)
    _add_replay(commands)
    text = "run load experiments and compare their results"
    bench = commands.add_parser("bench", help=text, description=_sentence(text))
    bench.set_defaults(run=run)
    actions = bench.add_subparsers(dest="action", required=True)
    _add_run(actions)
    for name, text, act, paths in _ACTIONS:
        action = actions.add_parser(name, help=text, description=_sentence(text))
        action.set_defaults(act=act)
        if act is not _report:
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
    command.add_argument(
        "--workload", required=True,
        help="YAML file with `streams` as in an experiment, or the streams themselves in braces",
    )  # fmt: skip
    command.add_argument(
        "--attainment", type=float, default=0.9,
        help="share of requests that must meet their objectives; default: %(default)s",
    )  # fmt: skip
    command.add_argument(
        "--device", help="roofline of this device, for example h100-80; default: the one at hand"
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
    command.add_argument("--data", type=Path, help="folder of public data sets; default: TANDEM_DATA")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _numbers(count: int) -> Callable[[str], tuple[float, ...]]:
    """A parser of so many numbers of at least 0, with commas between them."""

    def parsed(given: str) -> tuple[float, ...]:
        try:
            found = tuple(float(part) for part in given.split(","))
        except ValueError:
            found = ()
        if len(found) != count or not all(0 <= number < inf for number in found):
            raise argparse.ArgumentTypeError(f"{given}: should be {count} numbers of at least 0: 0.003,4e-6")
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


def _add_run(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run an experiment and write results.json, requests.jsonl and report.html"
    action = actions.add_parser("run", help=text, description=_sentence(text))
    action.set_defaults(act=_run)
    action.add_argument("experiment", type=Path, help="YAML file, for example configs/bench/load.yaml")
    action.add_argument("--out", type=Path, required=True, help="output folder")
    action.add_argument("--seeds", type=int, nargs="+", help="replaces the seeds of the experiment")
    action.add_argument("--quick", action="store_true", help="run only two loads, one seed and two systems")
    action.add_argument("--data", type=Path, help="folder of public data sets; default: TANDEM_DATA")


def run(options: argparse.Namespace) -> int:
    """Runs the action; returns its exit status, one of `ExitStatus`."""
    try:
        status: int = options.act(options)
    except ModuleNotFoundError as error:
        print(f"tandem: {error.name} is not installed; pip install 'tandem-llm[bench]'", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `tandem` ends without an error where the reader has closed its output.
        raise
    except (BadInput, ConfigError, OSError) as error:
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


def _capacity(options: argparse.Namespace) -> int:
    from benchmark_control_plane.capacity.command import capacity

    return capacity(options)


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
