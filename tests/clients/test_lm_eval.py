"""The recipe of lm-eval in docs/clients.md finds the log likelihoods that transformers computes."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.bundled_models import ensure_tiny_model
from tests.clients.client_table import probed_server
from tests.clients.recipes import PAGE, SHOWN_URL

_PYTHON = os.environ.get("TANDEM_LM_EVAL")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.untimed,
    pytest.mark.slow,
    pytest.mark.skipif(_PYTHON is None, reason="TANDEM_LM_EVAL names no Python with the package lm-eval"),
]

ITEMS = [
    {"question": "A queue forms where arrivals outpace", "choices": ["service", "memory"], "answer": 0},
    {"question": "Memory is what runs out", "choices": ["last", "first", "never at all"], "answer": 1},
    {"question": "Text with accents: déjà", "choices": ["vu", "naïve"], "answer": 0},
]
# The engine computes in bfloat16; a log likelihood of several tokens was found 0.011 off at most.
TOLERANCE = 0.1


def recipe() -> tuple[str, list[str]]:
    """The task and the command of the page, in words."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## lm-eval\n")[2].partition("\n## ")[0]
    task, commands = re.findall(r"```(?:yaml|sh)\n(.*?)```", section, re.DOTALL)
    return task, shlex.split(commands.replace("\\\n", " ").strip().splitlines()[-1])


def scored(folder: Path) -> Iterator[tuple[str, str, float]]:
    """Context, continuation and log likelihood of each request that lm-eval made."""
    [file] = folder.rglob("samples_*.jsonl")
    for line in file.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        for asked, [[likelihood, _]] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            yield asked["arg_0"], asked["arg_1"], float(likelihood)


def test_log_likelihoods_are_those_of_transformers(tmp_path: Path):
    model = ensure_tiny_model()
    task, (_, *options) = recipe()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "queues.yaml").write_text(task, encoding="utf-8")
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)), encoding="utf-8")
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet
    with probed_server() as url:
        options = [
            word.replace(SHOWN_URL, url).replace("$HOME/.cache/tandem/tiny-llama-1", str(model))
            for word in options
        ]
        assert any(url in word and str(model) in word for word in options)
        ran = subprocess.run(
            [str(_PYTHON), "-m", "lm_eval", *options],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-3000:]
    found = list(scored(tmp_path / "out"))
    assert len(found) == sum(len(item["choices"]) for item in ITEMS)
    for context, continuation, likelihood in found:
        assert likelihood == pytest.approx(expected(model, context, continuation), abs=TOLERANCE)


def expected(folder: Path, context: str, continuation: str) -> float:
    """The log likelihood that transformers computes in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    begin = len(tokenizer.encode(context, add_special_tokens=False))
    ids = tokenizer.encode(context + continuation, add_special_tokens=False)
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
    return float(sum(rows[at - 1, ids[at]] for at in range(begin, len(ids))))
