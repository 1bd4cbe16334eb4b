"""Runs the commands of the benchmark without their entry point, which only an installed distribution has."""

import argparse
from collections.abc import Sequence

from benchmark_control_plane.cli import add_command
from controlplane.commands.fleet import add_fleet_commands


def main(arguments: Sequence[str]) -> int:
    """Exit status of `tandem ARGUMENTS`."""
    parser = argparse.ArgumentParser(prog="tandem")
    commands = parser.add_subparsers(required=True)
    add_fleet_commands(commands)
    add_command(commands)
    options = parser.parse_args(arguments)
    return options.run(options)
