"""Runs `tandem bench` without its entry point, which only an installed distribution has."""

import argparse
from collections.abc import Sequence

from benchmark_control_plane.cli import add_command


def main(arguments: Sequence[str]) -> int:
    """Exit status of `tandem ARGUMENTS`, where the first argument is "bench"."""
    parser = argparse.ArgumentParser(prog="tandem")
    add_command(parser.add_subparsers(required=True))
    options = parser.parse_args(arguments)
    return options.run(options)
