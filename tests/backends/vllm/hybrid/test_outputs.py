"""Greedy answers are the same whoever keeps hidden states, whenever they leave them, and however blocks run
short. `play` runs the engines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HIDDEN_ROWS = 64
BLOCK_TOKENS = 32
MODELS = ["tandem/tiny-opt", "tandem/tiny-llama-mha"]


def _played(model, schedules):
    command = [sys.executable, str(Path(__file__).with_name("play.py")), model, str(schedules)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def _all_right(found):
    assert {name: one["same"] for name, one in found.items()} == {
        name: one["of"] for name, one in found.items()
    }
    assert {one["leaked"] for one in found.values()} == {0}


@pytest.mark.engine
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_of_vllm_alone(model):
    found = _played(model, schedules=3)
    lengths = found.pop("lengths")
    _all_right(found)
    # The last token is never cached.
    blocks = {rows: [-(-(length - 1) // rows) for length in lengths] for rows in (BLOCK_TOKENS, HIDDEN_ROWS)}
    assert found["all plain"]["most_blocks"] == blocks[BLOCK_TOKENS]
    assert found["all hidden"]["most_blocks"] == blocks[HIDDEN_ROWS]
    assert found["leaving"]["converted"] > 0
    assert found["leaving, scarce"]["preempted"] > 0
    assert found["leaving, scarce"]["converted"] > 0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_answers_survive_many_random_schedules(model):
    found = _played(model, schedules=200)
    found.pop("lengths")
    _all_right(found)
    random = [one for name, one in found.items() if name.startswith("schedule")]
    assert len(random) == 200
    # Rare events did occur, or nothing was shown.
    for event in ("preempted", "converted", "cut"):
        assert sum(one[event] for one in random) > 20, event
