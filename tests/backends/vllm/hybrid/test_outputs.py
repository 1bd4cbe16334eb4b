"""Greedy outputs do not depend on hidden states, conversions, preemptions or asynchronous scheduling.

`schedule_runner` runs the engines in a process of its own.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kernels.hybridcache.tiny_models import CONFIGS, save_model

HIDDEN_ROWS = 64
BLOCK_TOKENS = 32
TINY = ["tandem/tiny-opt", "tandem/tiny-llama-mha"]


def _finished(command, **environment):
    """Exit status and both outputs of a finished process, even if children of it still run."""
    # Files, because pipes stay open while any child runs.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        run = subprocess.run(command, env=os.environ | environment, stdout=out, stderr=errors, check=False)
        out.seek(0)
        errors.seek(0)
        return run.returncode, out.read(), errors.read()


def _run_schedules(model, schedules, *options, **environment):
    """Returns the engine's configuration and the results by schedule."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("schedule_runner.py")),
        model,
        str(schedules),
        *options,
    ]
    status, out, errors = _finished(command, **environment)
    assert status == 0, errors[-3000:]
    found = json.loads(out)
    return SimpleNamespace(**{name: found.pop(name) for name in ("mode", "runner", "lengths")}), found


def _assert_same_and_no_leak(found):
    assert {name: one["same"] for name, one in found.items()} == {
        name: one["of"] for name, one in found.items()
    }
    assert {one["leaked"] for one in found.values()} == {0}


def test_a_runner_that_dies_is_not_waited_for_while_its_children_live():
    script = """
import os, subprocess
print(subprocess.Popen(["tail", "-f", os.devnull]).pid, flush=True)
os._exit(3)
"""
    status, worker, _ = _finished([sys.executable, "-c", script])
    os.kill(int(worker), signal.SIGKILL)
    assert status == 3


@pytest.mark.engine
@pytest.mark.untimed
@pytest.mark.parametrize(
    "name",
    [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS],
)
def test_outputs_and_logits_equal_those_of_unmodified_vllm(name, tmp_path):
    save_model(name, tmp_path)
    engine, found = _run_schedules(str(tmp_path), 3)
    assert engine.mode == "NONE"
    _assert_same_and_no_leak(found)
    if engine.runner == 1:
        assert max(one["logits"] for one in found.values()) <= 1e-5
    # The last token is never cached.
    blocks = {
        rows: [-(-(length - 1) // rows) for length in engine.lengths] for rows in (BLOCK_TOKENS, HIDDEN_ROWS)
    }
    assert found["all plain"]["most_blocks"] == blocks[BLOCK_TOKENS]
    assert found["all hidden"]["most_blocks"] == blocks[HIDDEN_ROWS]
    assert found["leaving"]["converted"] > 0
    for name in ("leaving, scarce", "leaving, a step ahead"):
        assert found[name]["preempted"] > 0
        assert found[name]["converted"] > 0


@pytest.mark.engine
@pytest.mark.untimed
@pytest.mark.slow
def test_a_compiled_model_gives_the_same_outputs():
    """vLLM on a CPU compiles whole models, so a graph break would end the engine."""
    engine, found = _run_schedules("tandem/tiny-opt", 0, "compiled")
    assert engine.mode != "NONE"
    _assert_same_and_no_leak(found)
    assert found["leaving, scarce"]["converted"] > 0


@pytest.mark.engine
@pytest.mark.untimed
@pytest.mark.slow
@pytest.mark.parametrize("model", TINY)
def test_the_gpu_model_runner_gives_the_same_outputs(model):
    """vLLM has two model runners; the second is the default wherever Triton runs."""
    engine, found = _run_schedules(model, 0, TRITON_INTERPRET="1")
    assert engine.runner == 2
    _assert_same_and_no_leak(found)
    assert found["leaving, scarce"]["converted"] > 0


@pytest.mark.engine
@pytest.mark.untimed
@pytest.mark.slow
@pytest.mark.parametrize("model", TINY)
def test_outputs_are_unchanged_under_many_random_schedules(model):
    _, found = _run_schedules(model, 200)
    _assert_same_and_no_leak(found)
    random = [one for name, one in found.items() if name.startswith("schedule")]
    assert len(random) == 200
    # The test is only valid if the rare events occurred.
    for event in ("preempted", "converted", "became_hidden", "cut"):
        assert sum(one[event] for one in random) > 20, event
