"""Tests of saving, restoring and training checkpoints of the length predictor."""

import asyncio
import logging
import os
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from predictors.output_length import checkpoint
from predictors.output_length.checkpoint import Checkpoint, read, read_or_rename, require_writable, save
from predictors.output_length.examples import FeatureRow
from predictors.output_length.learned_predictor import LearnedLengths
from predictors.output_length.training import train_in_subprocess
from predictors.output_length.trees import Trees


@pytest.fixture
def learned(traffic):
    lengths = LearnedLengths(max_examples=250)
    for request, tokens in traffic(Random(0), 250):
        lengths.forecast(request)
        lengths.observe(request, tokens)
    return lengths


@pytest.mark.long
async def test_model_trained_in_a_subprocess_survives_save_and_read(tmp_path, learned):
    model = await train_in_subprocess(Checkpoint(learned.examples.table()))
    path = tmp_path / "lengths.npz"
    save(path, Checkpoint(learned.examples.table(), model, learned.calibration_state()))
    kept = read_or_rename(path)
    assert kept is not None and kept.model is not None
    table = learned.examples.table()
    row = FeatureRow(table.numbers[3], table.words[3], 0)
    before = model.predict(row)
    assert kept.model.predict(row) == pytest.approx(before)
    assert before[5] != pytest.approx(learned.model.predict(row)[5])
    assert kept.calibration == learned.calibration_state()
    assert path.stat().st_size < 5_000_000


def test_concurrent_saves_are_serialised(tmp_path, monkeypatch, learned):
    begun, may_go, writing, together = threading.Event(), threading.Event(), [], []
    really = np.savez_compressed

    def slowly(file, **arrays):
        writing.append(file)
        together.append(len(writing))
        begun.set()
        assert may_go.wait(30)
        really(file, **arrays)
        writing.remove(file)

    monkeypatch.setattr(np, "savez_compressed", slowly)
    path, kept = tmp_path / "lengths.npz", Checkpoint(learned.examples.table())
    with ThreadPoolExecutor(2) as both:
        first = both.submit(save, path, kept)
        assert begun.wait(30)
        second = both.submit(save, path, kept)
        # While the first save runs, the second does not start.
        assert not wait([second], 0.2).done
        may_go.set()
        first.result(), second.result()
    assert together == [1, 1]
    assert len(read(path).table) == 250


def test_servers_that_share_a_file_do_not_write_into_each_others(tmp_path, monkeypatch, learned):
    """As the boxes of one machine when they stop: another process saves while this one writes."""
    path, kept = tmp_path / "lengths.npz", Checkpoint(learned.examples.table())
    really, saved_by_other = np.savez_compressed, []

    def interrupted(file, **arrays):
        really(file, **arrays)
        if not saved_by_other:
            saved_by_other.append(file)
            require_writable(path)
            save(path, Checkpoint(learned.examples.table().head(7)))
            assert len(read(path).table) == 7

    monkeypatch.setattr(np, "savez_compressed", interrupted)
    # Which the other process does not have.
    monkeypatch.setattr(checkpoint, "_saving", nullcontext())
    save(path, kept)
    assert len(read(path).table) == 250
    assert [each.name for each in tmp_path.iterdir()] == ["lengths.npz"]


async def test_cancelling_training_kills_its_process(tmp_path, monkeypatch, learned):
    pipe, program = tmp_path / "pipe", tmp_path / "python"
    os.mkfifo(pipe)
    program.write_text(f"#!/bin/sh\necho $$ > {pipe}\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    training = asyncio.create_task(train_in_subprocess(Checkpoint(learned.examples.table())))
    number = int(await asyncio.to_thread(pipe.read_text))
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


async def test_training_reports_too_few_examples(learned):
    with pytest.raises(RuntimeError, match="at least 200"):
        await train_in_subprocess(Checkpoint(learned.examples.table().head(10)))


def test_missing_file_gives_no_checkpoint(tmp_path):
    assert read_or_rename(tmp_path / "none.npz") is None


@pytest.mark.parametrize("how", ["cut", "garbage", "version"])
def test_unreadable_file_is_renamed(tmp_path, caplog, learned, how):
    path = tmp_path / "lengths.npz"
    save(path, Checkpoint(learned.examples.table(), None, learned.calibration_state()))
    if how == "version":
        with path.open("wb") as file:
            np.savez(file, version=np.array(99))
    else:
        path.write_bytes(path.read_bytes()[:500] if how == "cut" else b"garbage")
    with caplog.at_level(logging.WARNING):
        assert read_or_rename(path) is None
    assert not path.exists()
    assert path.with_name("lengths.npz.corrupt").exists()
    assert "renamed to" in caplog.text
    with pytest.raises(FileNotFoundError):
        read(path)


@pytest.mark.parametrize("part", ["numbers", "words", "log_tokens", "conformal"])
def test_other_features_or_levels_are_rejected(tmp_path, learned, part):
    path, table, calibration = tmp_path / "lengths.npz", learned.examples.table(), learned.calibration_state()
    if part == "conformal":
        calibration = {"conformal": [["chat", 0, 1, 0.9, [0.0, 0.0]]]}
    elif part == "log_tokens":
        table = replace(table, log_tokens=table.log_tokens[:-1])
    else:
        table = replace(table, **{part: getattr(table, part)[:, :-1]})
    save(path, Checkpoint(table, None, calibration))
    with pytest.raises(ValueError, match="not a saved length predictor"):
        read(path)


def test_corrupted_bytes_raise_value_error(tmp_path, learned):
    path = tmp_path / "lengths.npz"
    save(path, Checkpoint(learned.examples.table(), None, learned.calibration_state()))
    whole, random, failed = path.read_bytes(), Random(1), 0
    for _ in range(150):
        broken = bytearray(whole)
        for _ in range(random.choice((1, 40))):
            broken[random.randrange(len(broken))] ^= 1 << random.randrange(8)
        path.write_bytes(broken)
        try:
            read(path)
        except ValueError as error:
            assert "not a saved length predictor" in str(error)
            failed += 1
    # Some bytes, such as time stamps, have no effect.
    assert failed > 100


def test_files_without_the_untrained_requests_are_read(tmp_path, learned, monkeypatch):
    really = np.savez_compressed

    def former(file, *, untrained, **arrays):
        really(file, **arrays)

    path, table = tmp_path / "lengths.npz", learned.examples.table()
    trained = replace(learned.model, trees=Trees(*np.zeros((3, 1, 1, 1))))
    found = {}
    for name, model in {"none": None, "prior": learned.model, "trained": trained}.items():
        with monkeypatch.context() as patch:
            patch.setattr(np, "savez_compressed", former)
            save(path, Checkpoint(table, model))
        found[name] = read(path).untrained
    assert found == {"none": 250, "prior": 250, "trained": 0}


def test_full_disk_keeps_the_previous_file(tmp_path, learned):
    path = tmp_path / "lengths.npz"
    save(path, Checkpoint(learned.examples.table()))
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            save(path, Checkpoint(learned.examples.table(), learned.model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_require_place_checks_the_path(tmp_path):
    require_writable(tmp_path / "lengths.npz")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        require_writable(tmp_path / "nowhere" / "lengths.npz")
