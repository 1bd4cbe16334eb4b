"""The command `tandem drain`: takes a running server out of service."""

import argparse

from controlplane.commands.admin_api import CHANGE_TIMEOUT_S, add_server, call, print_json
from controlplane.commands.exit_status import ExitStatus


def add_drain_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the parser of the command."""
    text = "reject new and waiting requests of a running server, and wait until none runs"
    parser = commands.add_parser("drain", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_server(parser)
    parser.set_defaults(run=_drain)


def _drain(options: argparse.Namespace) -> int:
    answer = call(options, "POST", "/admin/drain", timeout_s=CHANGE_TIMEOUT_S)
    if options.json:
        print_json(answer)
    else:
        print(f"{answer['status']}: no request runs; only a restart of the server admits requests again")
    return ExitStatus.DONE
