"""Greedy answers are the same whoever keeps hidden states, whenever they leave them, however blocks run
short, and whether or not a step is planned while the last one runs. `play` runs the engines."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kernels.hybridcache.little import CONFIGS, save_model

HIDDEN_ROWS = 64
BLOCK_TOKENS = 32
TINY = ["tandem/tiny-opt", "tandem/tiny-llama-mha"]


def _ended(command, **environment):
    """Exit status and both outputs of a process that has ended, whoever of its own still runs."""
    # Files, because pipes stay open as long as any of its workers.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        run = subprocess.run(command, env=os.environ | environment, stdout=out, stderr=errors, check=False)
        out.seek(0)
        errors.seek(0)
        return run.returncode, out.read(), errors.read()


def _played(model, schedules, *options, **environment):
    """How the engine ran, and what came out by schedule."""
    command = [sys.executable, str(Path(__file__).with_name("play.py")), model, str(schedules), *options]
    status, out, errors = _ended(command, **environment)
    assert status == 0, errors[-3000:]
    found = json.loads(out)
    return SimpleNamespace(**{name: found.pop(name) for name in ("mode", "runner", "lengths")}), found


def _all_right(found):
    assert {name: one["same"] for name, one in found.items()} == {
        name: one["of"] for name, one in found.items()
    }
    assert {one["leaked"] for one in found.values()} == {0}


def test_a_player_that_dies_is_not_waited_for_while_its_workers_live():
    script = """
import os, subprocess
print(subprocess.Popen(["tail", "-f", os.devnull]).pid, flush=True)
os._exit(3)
"""
    status, worker, _ = _ended([sys.executable, "-c", script])
    os.kill(int(worker), signal.SIGKILL)
    assert status == 3


@pytest.mark.engine
@pytest.mark.untimed
@pytest.mark.parametrize("name", CONFIGS)
def test_answers_and_logits_are_those_of_vllm_alone(name, tmp_path):
    save_model(name, tmp_path)
    engine, found = _played(str(tmp_path), 3)
    assert engine.mode == "NONE"
    _all_right(found)
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
def test_a_compiled_model_answers_the_same():
    """vLLM on a CPU compiles whole models, so a break in the graph would end the engine."""
    engine, found = _played("tandem/tiny-opt", 0, "compiled")
    assert engine.mode != "NONE"
    _all_right(found)
    assert found["leaving, scarce"]["converted"] > 0


@pytest.mark.engine
@pytest.mark.untimed
@pytest.mark.slow
@pytest.mark.parametrize("model", TINY)
def test_the_runner_for_gpus_answers_the_same(model):
    """vLLM has two; its second one is the default wherever Triton runs."""
    engine, found = _played(model, 0, TRITON_INTERPRET="1")
    assert engine.runner == 2
    _all_right(found)
    assert found["leaving, scarce"]["converted"] > 0


@pytest.mark.engine
@pytest.mark.untimed
@pytest.mark.slow
@pytest.mark.parametrize("model", TINY)
def test_answers_survive_many_random_schedules(model):
    _, found = _played(model, 200)
    _all_right(found)
    random = [one for name, one in found.items() if name.startswith("schedule")]
    assert len(random) == 200
    # Rare events did occur, or nothing was shown.
    for event in ("preempted", "converted", "hid", "cut"):
        assert sum(one[event] for one in random) > 20, event
