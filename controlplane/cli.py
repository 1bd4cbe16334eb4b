"""Serves an LLM and embedding models on one device, and plans, checks and measures configurations."""

import argparse
import atexit
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from controlplane import __version__

try:
    from controlplane.api.early_signals import early_signals
    from controlplane.commands.admin_api import CommandFailed
    from controlplane.commands.config_changes import add_config_commands
    from controlplane.commands.drain import add_drain_command
    from controlplane.commands.exit_status import ExitStatus
    from controlplane.commands.fleet import add_fleet_commands
    from controlplane.commands.request_explanation import add_explain_command
    from controlplane.commands.top import add_top_command
    from controlplane.config import Config, ConfigError, load, parse
    from controlplane.config.config_file import ConfigFile
    from controlplane.config.models_section import RerankerModel
    from controlplane.config.packaged import config_path
    from controlplane.log_output import ENGINE_LEVELS, set_engine_log_level, set_up_logging
except ModuleNotFoundError as error:
    # The bare install is the client; the command is installed with it but needs the server's packages.
    remedy = "it is in Tandem's extra 'server'; in a clone: pip install '.[server]'"
    raise SystemExit(f"tandem: {error.name} is not installed; {remedy}") from None

if TYPE_CHECKING:
    from predictors.output_length.log_replay import Logged

_CONFIG_HELP = "YAML file, or a packaged name: dev, colocated"
_COMMANDS = "tandem.commands"
"""Entry-point group of further commands. Each entry is a function that adds a parser to the sub-parsers it is
given and sets that parser's default `run`: a function from the parsed options to the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status, one of `ExitStatus`."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except CommandFailed as error:
        print(error, file=sys.stderr)
        return error.status
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitStatus.BAD_INPUT
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        # The reader, for example head, has what it wanted. Python would fail again on its last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem", description=__doc__)
    parser.add_argument("--version", action="version", version=f"tandem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_init(commands)
    _add_check(commands)
    _add_serve(commands)
    add_config_commands(commands)
    add_explain_command(commands)
    add_drain_command(commands)
    add_top_command(commands)
    add_fleet_commands(commands)
    for command_entry in entry_points(group=_COMMANDS):
        command_entry.load()(commands)
    _add_predictor(commands)
    text = "print a completion script for a shell; needs the extra [cli]"
    completion = commands.add_parser("completion", help=text, description=_sentence(text))
    completion.set_defaults(run=_completion)
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell that reads the script")
    return parser


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _add_init(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "write a commented configuration for these models, whose memory plan fits the device"
    init = commands.add_parser("init", help=text, description=_sentence(text))
    init.set_defaults(run=_init)
    named = "folder, bundled name or Hugging Face name of"
    init.add_argument("model", help=f"{named} the chat model")
    init.add_argument("--embed", required=True, metavar="MODEL", help=f"{named} the embedding model")
    init.add_argument("--rerank", metavar="MODEL", help=f"{named} a reranker")
    init.add_argument("--device", help="plan for this device, for example h100-80; default: the one at hand")
    init.add_argument("--out", type=Path, help="file to write; default: standard output")
    init.add_argument("--force", action="store_true", help="overwrite the file of --out")
    init.add_argument(
        "--json", action="store_true", help="print the facts of `tandem check`, and file or text, as JSON"
    )


def _add_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "validate a configuration and print the memory plan, without loading a model"
    check = commands.add_parser("check", help=text, description=_sentence(text))
    check.set_defaults(run=_check)
    check.add_argument("config", type=Path, help=_CONFIG_HELP)
    check.add_argument("--json", action="store_true", help="print the facts as JSON")


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "start the engines and the API"
    serve = commands.add_parser("serve", help=text, description=_sentence(text))
    serve.set_defaults(run=_run_serve)
    serve.add_argument("config", type=Path, help=_CONFIG_HELP)
    serve.add_argument("--host", help="overrides server.host")
    serve.add_argument("--port", type=_port, help="overrides server.port; 0 takes any free port")
    serve.add_argument(
        "--open", action="store_true", default=None, help="sets server.open: no client needs a key"
    )
    serve.add_argument("--watch", action="store_true", help="apply the file again when it changes")
    serve.add_argument(
        "--engine-log", choices=ENGINE_LEVELS, metavar="LEVEL",
        help="level of the lines of vLLM and transformers; info also shows downloads; "
        "default: $VLLM_LOGGING_LEVEL, or warning",
    )  # fmt: skip


def _run_serve(options: argparse.Namespace) -> int:
    overrides = {"host": options.host, "port": options.port, "open": options.open}
    stated = {key: value for key, value in overrides.items() if value is not None}
    with early_signals() as received:
        file = ConfigFile(config_path(options.config), stated)
        _serve(file, file.load(), options, received)


def _port(given: str) -> int:
    if not given.isdecimal() or int(given) > 65_535:
        raise argparse.ArgumentTypeError(f"{given}: should be a number from 0 to 65535")
    return int(given)


def _add_predictor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    predictor = commands.add_parser("predictor", help="train or evaluate the output-length predictor on logs")
    actions = predictor.add_subparsers(dest="action", required=True)
    train = _add_log_action(
        actions, "train", "train on a log and write a checkpoint for predictors.file", _train
    )
    train.add_argument("--to", type=Path, required=True, help="checkpoint to write")
    text = "replay a log in order and print the accuracy of the forecasts"
    _add_log_action(actions, "eval", text, _evaluate)


def _add_log_action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    action = actions.add_parser(name, help=text, description=_sentence(text))
    action.set_defaults(run=run)
    action.add_argument("--json", action="store_true", help="print the result as JSON")
    action.add_argument("log", type=Path, help="JSONL: prompt (text or messages), output_tokens, model")
    action.add_argument("--max-examples", type=int, default=8_192, help="use this many of the last requests")
    return action


@contextmanager
def _logged_answers(options: argparse.Namespace) -> Iterator["Iterator[Logged]"]:
    """The answers of the log. Raises ConfigError for what is wrong with options or files in the block."""
    from predictors.output_length.log_replay import parse_log
    from predictors.output_length.quantile_model import ENOUGH

    if not ENOUGH <= options.max_examples <= 100_000:
        rule = f"should be from {ENOUGH} to 100,000, like predictors.max_examples; change it"
        raise ConfigError(f"--max-examples={options.max_examples}: {rule}")
    try:
        with options.log.open(encoding="utf-8") as lines:
            yield parse_log(lines)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{options.log}: {error}") from error


def _train(options: argparse.Namespace) -> int:
    from predictors.output_length.checkpoint import Checkpoint, require_writable, save
    from predictors.output_length.log_replay import train_from

    with _logged_answers(options) as answers:
        require_writable(options.to)
        lengths = train_from(answers, max_examples=options.max_examples)
        save(options.to, Checkpoint(lengths.examples.table(), lengths.model, lengths.calibration_state()))
    requests = len(lengths.examples)
    if options.json:
        print(json.dumps({"checkpoint": str(options.to), "requests": requests}, indent=1))
    else:
        print(f"{options.to}: trained on {requests:,} requests")
    return ExitStatus.DONE


def _evaluate(options: argparse.Namespace) -> int:
    from predictors.output_length.learned_predictor import LearnedLengths
    from predictors.output_length.log_replay import replay, report

    with _logged_answers(options) as answers:
        lengths = LearnedLengths(max_examples=options.max_examples)
        facts = asdict(report(lengths.calibration, replay(answers, lengths)))
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        _print_scores(facts)
    return ExitStatus.DONE


def _print_scores(facts: Mapping[str, Any]) -> None:
    from controlplane.commands.output import print_table

    scores = [name for name in facts if name != "answers"]
    rows = [(name, *(f"{facts[score][name]:.3g}" for score in scores)) for name in facts["coverage"]]
    print(f"{facts['answers']:,} requests")
    print_table("forecasts of the output length", ("class", *scores), rows)


def _check(options: argparse.Namespace) -> int:
    from controlplane.commands.check import check_facts, print_facts

    facts = check_facts(load(config_path(options.config)))
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        print_facts(facts)
    return ExitStatus.DONE


def _init(options: argparse.Namespace) -> int:
    from controlplane.commands.starter_config import Models, starter_yaml

    out: Path | None = options.out
    if out is not None and out.exists() and not options.force:
        raise ConfigError(f"{out}: exists; choose another --out, or overwrite it with --force")
    text = starter_yaml(Models(options.model, options.embed, options.rerank), options.device)
    if out is not None:
        try:
            with out.open("w" if options.force else "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"{out}: {error.strerror}; choose another --out") from error
    if options.json:
        from controlplane.commands.check import check_facts
        from controlplane.config.loader import yaml_content

        written = {"yaml": text} if out is None else {"file": str(out)}
        config = parse(yaml_content(text, source="init"), source="init")
        print(json.dumps(written | check_facts(config), indent=1))
    else:
        print(text, end="") if out is None else print(out)
    return ExitStatus.DONE


def _completion(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError:
        remedy = "it is in Tandem's extra 'cli'; in a clone: pip install '.[cli]'"
        raise ConfigError(f"shtab is not installed; {remedy}") from None
    print(shtab.complete(_parser(), options.shell))
    return ExitStatus.DONE


def _serve(file: ConfigFile, config: Config, options: argparse.Namespace, signals: Sequence[int]) -> NoReturn:
    """Serves until a signal and exits. Raises ConfigError before engines start.

    `signals` were received before and reload the configuration once the service has started.
    """
    from controlplane.api.early_probes import PLANNING, EarlyProbeServer
    from controlplane.api.listening_sockets import listening

    _require_engines(config)
    host, health_port = config.server.host, config.server.health_port
    sockets, probe_sockets = listening(host, config.server.port), []
    if health_port is not None:
        probe_sockets = listening(host, health_port, key="server.health_port")
    with EarlyProbeServer(sockets, probe_sockets).serving() as early:
        # They take longer than all before them, so that they are imported once the ports are bound.
        from controlplane.api.config_reload import WATCH_SECONDS
        from controlplane.api.graceful_server import Hosting, host_forever
        from controlplane.commands.start_display import start_display
        from controlplane.service.bootstrap import assemble
        from controlplane.start_key import StartKey

        set_up_logging(config.log)
        set_engine_log_level(options.engine_log)
        early.stage = PLANNING
        service = assemble(config)
    needs_key = config.server.admin_key_sha256 is None and config.server.is_local()
    watch_seconds, start_key = WATCH_SECONDS if options.watch else None, StartKey() if needs_key else None
    hosting = Hosting(
        file, watch_seconds, start_display, start_key, sockets, early.kept, signals, probe_sockets
    )
    _end(host_forever(service, config, hosting))


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
        "vllm": ("vllm", "vllm"),
        "sentence-transformers": ("sentence_transformers", "embeddings"),
    }
    for model in config.models.all():
        # A plug-in backend is found through its entry point.
        backend = "sentence-transformers" if isinstance(model, RerankerModel) else model.backend
        package, extra = needed.get(backend, (None, None))
        if package is not None and find_spec(package) is None:
            raise ConfigError(
                f"model {model.served_name}: the package {package} is not installed; "
                f"install the extra {extra}; in a clone: pip install '.[{extra}]', without a GPU: make setup"
            )


if __name__ == "__main__":
    raise SystemExit(main())
