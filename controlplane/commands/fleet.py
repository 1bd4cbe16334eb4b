"""`tandem fleet serve`: boxes on one machine, on Ray Serve. The benchmark adds `tandem fleet plan`."""

import argparse
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from controlplane.config import ConfigError
from controlplane.config.fleet_file import BoxFile, FleetFile, parse_fleet
from controlplane.config.loader import read_yaml


def add_fleet_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `fleet` and its sub-commands."""
    text = "serve several boxes behind one address, and plan how many"
    actions = commands.add_parser("fleet", help=text).add_subparsers(dest="action", required=True)
    text = (
        "start the boxes, routers and HAProxy on this machine, with the extra [ray]; for several machines "
        "see docs/fleet.md"
    )
    serve = actions.add_parser("serve", help=text, description=f"{text[0].upper()}{text[1:]}.")
    serve.set_defaults(run=_serve)
    serve.add_argument("file", type=Path, help="YAML file with kinds of boxes and routers")
    serve.add_argument("--port", type=int, default=8000, help="TCP port, on all addresses (default: 8000)")


def _serve(options: argparse.Namespace) -> int:
    file: Path = options.file

    def read() -> tuple[FleetFile, Mapping[str, BoxFile]]:
        return parse_fleet(read_yaml(file), source=str(file), folder=file.parent)

    read()
    if not 1 <= options.port <= 65_535:
        raise ConfigError(f"--port={options.port}: should be a number from 1 to 65535")
    _require_free(options.port)
    if find_spec("ray") is None:
        raise ConfigError(
            "the package ray is not installed; install the extra ray; in a clone: pip install '.[ray]'"
        )
    from controlplane.fleet_on_ray.local_cluster import serve_fleet

    return serve_fleet(read, port=options.port)


def _require_free(port: int) -> None:
    """Raises ConfigError if the port cannot be bound; the boxes would load for minutes first."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"--port={port}: {error.strerror}; stop the program that listens there, or choose another"
            ) from None
