"""Runs the kernel comparison in the interpreter and, on a GPU, compiled."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

CASES = Path(__file__).with_name("interpreted.py")


def _agree(**environment):
    # Without the conftest, which would import the engine.
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: the hybrid extra")
def test_every_interpreted_kernel_equals_its_reference():
    _agree(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_every_compiled_kernel_equals_its_reference():
    _agree()
