"""Tests of `tandem predictor`: training and scoring on an operator's log."""

import json
from random import Random

import pytest

from controlplane.cli import main
from predictors.output_length.checkpoint import read


@pytest.fixture
def log(tmp_path):
    random, path = Random(0), tmp_path / "log.jsonl"
    lines = []
    for number in range(400):
        kind, tokens = random.choice([("list", 40), ("essay", 900)])
        content = f"{kind} topic {number % 20}"
        prompt = content if number % 2 else [{"role": "user", "content": content}]
        answer = round(tokens * random.lognormvariate(0, 0.2))
        lines.append(json.dumps({"prompt": prompt, "output_tokens": answer, "model": "m", "class": "chat"}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_train_writes_a_checkpoint(tmp_path, log, capsys):
    file = tmp_path / "lengths.npz"
    assert main(["predictor", "train", str(log), "--to", str(file)]) == 0
    kept = read(file)
    assert (len(kept.table), kept.model is not None) == (400, True)
    assert "400" in capsys.readouterr().out


def test_eval_prints_scores(log, capsys):
    assert main(["predictor", "eval", str(log), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answers"] == 400
    assert found["coverage"]["chat"] == pytest.approx(0.9, abs=0.06)
    assert found["pinball"]["chat"] < found["error"]["chat"] < 350
    assert abs(found["drift"]["chat"]) < 1


def test_empty_log_and_too_small_max_examples_are_rejected(tmp_path, log, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert main(["predictor", "eval", str(empty)]) == 2
    assert "the log holds no request" in capsys.readouterr().err
    for remember in ("0", "999999999999"):
        assert main(["predictor", "eval", str(log), "--max-examples", remember]) == 2
        assert f"--max-examples={remember}: should be from 200" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ('{"prompt": "x", "model": "m"}', "output_tokens"),
        ('{"prompt": "x", "model": "m", "output_tokens": -1}', "output_tokens=-1"),
        ('{"prompt": 5, "model": "m", "output_tokens": 1}', "line 1"),
        ("[]", "line 1"),
    ],
)
def test_malformed_line_is_named(tmp_path, capsys, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    assert main(["predictor", "eval", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_short_log_names_the_required_count(tmp_path, log, capsys):
    short = tmp_path / "short.jsonl"
    short.write_text("".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[:50]))
    assert main(["predictor", "train", str(short), "--to", str(tmp_path / "x.npz")]) == 2
    assert "at least 200" in capsys.readouterr().err
