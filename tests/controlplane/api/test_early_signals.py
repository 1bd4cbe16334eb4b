"""Signals that come before the server's event loop runs: what ends a process ends it with status 0."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark_control_plane.common.servers import free_port
from controlplane.api.early_signals import ENDING, RELOADING, early_signals

pytestmark = pytest.mark.long

# `tandem serve` whose memory plan takes until a line comes, and then fails.
_SERVE = """
import sys
from controlplane.cli import main
from controlplane.config import ConfigError
from controlplane.service import bootstrap

def assemble(config):
    print("planning", flush=True)
    sys.stdin.readline()
    raise ConfigError("that is all")

bootstrap.assemble = assemble
raise SystemExit(main(["serve", *sys.argv[1:]]))
"""


def planning(folder: Path) -> "subprocess.Popen[str]":
    """A server that plans its memory."""
    file = folder / "my.yaml"
    file.write_text("models: {embeddings: [{model: m}]}\n", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(file), "--port", str(free_port())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "planning\n"
    return process


@pytest.mark.parametrize("number", ENDING)
def test_the_process_ends_with_status_0_without_a_traceback(tmp_path: Path, number: int):
    pytest.importorskip("sentence_transformers")
    with planning(tmp_path) as process:
        process.send_signal(number)
        _, shown = process.communicate(timeout=60)
        assert process.returncode == 0
    assert "the start was ended by a signal" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("number", RELOADING)
def test_a_signal_that_reloads_ends_nothing(tmp_path: Path, number: int):
    pytest.importorskip("sentence_transformers")
    with planning(tmp_path) as process:
        process.send_signal(number)
        _, shown = process.communicate("go on\n", timeout=60)
        assert (process.returncode, shown.splitlines()[-1]) == (2, "that is all")


def test_handlers_of_others_are_restored():
    former = {number: signal.getsignal(number) for number in (*ENDING, *RELOADING)}
    with early_signals() as came:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert came == [signal.SIGUSR1]
        assert all(signal.getsignal(number) is not handler for number, handler in former.items())
    assert {number: signal.getsignal(number) for number in former} == former
