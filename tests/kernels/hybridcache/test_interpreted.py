import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("interpreted.py")


def _agree(**environment):
    # Without our conftest: it would import the engine.
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: the hybrid extra")
def test_every_kernel_does_what_its_reference_does():
    _agree(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_so_does_every_kernel_compiled_for_the_device():
    _agree()
