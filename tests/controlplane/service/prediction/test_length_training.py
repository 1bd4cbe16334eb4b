"""Training starts when enough requests have finished, and runs in a process of its own."""

import asyncio
import errno
import logging
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from controlplane.config import ConfigError, parse
from controlplane.service.prediction import length_training
from controlplane.service.prediction.length_training import LengthTraining, require_writable_file
from predictors.output_length.checkpoint import read, save
from predictors.output_length.features import prompt_features
from predictors.output_length.learned_predictor import LearnedLengths
from tests.example_requests import a_request


def serve(lengths, count, seed=0, factor=1):
    random = Random(seed)
    for number in range(count):
        kind, tokens = random.choice([("list", 40), ("essay", 900)])
        features = prompt_features(f"{kind} topic {number % 20}")
        request = a_request(f"{seed}-{number}", 10, 4_096, class_name="chat", features=features)
        lengths.forecast(request)
        lengths.observe(request, round(factor * tokens * random.lognormvariate(0, 0.2)))


@pytest.mark.long
async def test_training_starts_once_enough_examples_are_new():
    lengths = LearnedLengths()
    learning = LengthTraining(lengths, every_seconds=3_600, file=None)
    first = lengths.model
    serve(lengths, 199)
    await learning.train_if_due()
    assert lengths.model is first
    serve(lengths, 1, seed=1)
    await learning.train_if_due()
    second = lengths.model
    assert second is not first
    serve(lengths, 99, seed=2)
    await learning.train_if_due()
    assert lengths.model is second


@pytest.mark.long
async def test_examples_and_model_survive_a_restart(tmp_path):
    file = tmp_path / "lengths.npz"
    lengths = LearnedLengths()
    learning = LengthTraining(lengths, every_seconds=3_600, file=file)
    await learning.start()
    serve(lengths, 250)
    await learning.train()
    await learning.stop()
    again = LearnedLengths()
    restarted = LengthTraining(again, every_seconds=3_600, file=file)
    await restarted.start()
    await restarted.stop()
    assert len(again.examples) == 250
    assert again.model is not None and again.model.trees is not None


async def restarted(file, requests, seed, monkeypatch):
    """Serves some requests between a start and a stop; returns whether a model was trained."""
    trained = []

    async def training(checkpoint):
        trained.append(checkpoint)
        raise RuntimeError("not trained in this test")

    monkeypatch.setattr(length_training, "train_in_subprocess", training)
    lengths = LearnedLengths()
    learning = LengthTraining(lengths, every_seconds=3_600, file=file)
    await learning.start()
    serve(lengths, requests, seed=seed)
    await learning.train_if_due()
    await learning.stop()
    return bool(trained)


async def test_requests_before_a_restart_count_towards_the_next_training(tmp_path, monkeypatch):
    file = tmp_path / "lengths.npz"
    # No model was trained of these, although the shipped one is saved with them.
    assert not await restarted(file, 190, 0, monkeypatch)
    assert await restarted(file, 50, 1, monkeypatch)
    kept = read(file)
    assert kept.untrained == 240
    save(file, replace(kept, untrained=60))
    assert not await restarted(file, 30, 2, monkeypatch)
    assert await restarted(file, 30, 3, monkeypatch)


async def test_a_full_disk_is_logged_with_the_file_name(tmp_path, monkeypatch, caplog):
    def fill(*_args, **_arrays):
        raise OSError(errno.ENOSPC, "No space left on device")

    learning = LengthTraining(lengths := LearnedLengths(), every_seconds=3_600, file=tmp_path / "lengths.npz")
    await learning.start()
    serve(lengths, 10)
    monkeypatch.setattr(np, "savez_compressed", fill)
    await learning.stop()
    assert f"predictors.file={tmp_path}/lengths.npz: the length model was not saved: No space" in caplog.text
    assert list(tmp_path.iterdir()) == []


async def test_a_failed_training_is_logged_and_leaves_the_model(caplog):
    lengths = LearnedLengths()
    learning = LengthTraining(lengths, every_seconds=3_600, file=None)
    first = lengths.model
    serve(lengths, 10)
    with caplog.at_level(logging.WARNING):
        await learning.train()
    assert lengths.model is first
    assert "the present model stays in use" in caplog.text


async def test_lost_coverage_is_logged_once_and_when_it_returns(caplog):
    lengths = LearnedLengths()
    learning = LengthTraining(lengths, every_seconds=3_600, file=None)
    caplog.set_level(logging.INFO)
    serve(lengths, 60)
    serve(lengths, 30, factor=20)
    await learning.train_if_due()
    assert "class chat: more outputs than expected exceed their 0.9 quantile" in caplog.text
    caplog.clear()
    await learning.train_if_due()
    assert caplog.text == ""
    serve(lengths, 100)
    await learning.train_if_due()
    assert "class chat: the 0.9 quantile covers" in caplog.text


@pytest.mark.long
async def test_requests_are_served_during_training():
    lengths = LearnedLengths()
    serve(lengths, 300)
    learning = asyncio.create_task(LengthTraining(lengths, every_seconds=3_600, file=None).train())
    served = 0
    while not learning.done() and served < 100:
        serve(lengths, 1, seed=10 + served)
        served += 1
        await asyncio.sleep(0)
    await learning
    assert served > 1
    assert lengths.examples.seen == 300 + served


@pytest.mark.parametrize("content", [b"", b"PK garbage"])
async def test_a_corrupt_file_does_not_stop_the_start(tmp_path, content):
    file = tmp_path / "lengths.npz"
    file.write_bytes(content)
    learning = LengthTraining(LearnedLengths(), every_seconds=3_600, file=file)
    await learning.start()
    await learning.stop()
    assert file.with_name("lengths.npz.corrupt").read_bytes() == content
    assert file.stat().st_size > len(content)


def test_an_unwritable_file_is_a_config_error(tmp_path):
    def config(*, file="nowhere/lengths.npz", **admission):
        predictors = {"file": str(tmp_path / file)}
        models = {"chat": {"model": "m"}}
        return parse({"models": models, "predictors": predictors, "admission": admission})

    with pytest.raises(ConfigError, match=r"predictors\.file=.*lengths\.npz: No such file.*name a file in"):
        require_writable_file(config())
    require_writable_file(config(length_predictor="history"))
    with pytest.raises(ConfigError, match=r"predictors\.file=.*: not a regular file; name a file"):
        require_writable_file(config(file=""))
