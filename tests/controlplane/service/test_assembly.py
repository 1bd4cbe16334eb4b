"""What a configuration promises of memory is there, and what an engine can do can be asked for."""

from dataclasses import fields
from inspect import signature

import pytest

from backends.embedding.client import WorkerEmbedder
from backends.scripted import ScriptedEmbedder
from benchmark_control_plane.virtual_time import run
from controlplane.config import ConfigError, parse
from controlplane.config.models import EmbeddingModel
from controlplane.service.assembly import Service
from controlplane.service.clocks import LoopClock

TWO = {"models": {"embeddings": [{"model": "one"}, {"model": "two"}]}}


async def started(workspace_bytes: int) -> None:
    embedders = [
        ScriptedEmbedder(model=model, bytes_per_token=1, batch_tokens=1_000) for model in ("one", "two")
    ]
    service = Service(parse(TWO), [], embedders, workspace_bytes=workspace_bytes, clock=LoopClock())
    await service.start()
    await service.stop()


def test_the_largest_batches_of_all_embedding_models_fit_side_by_side():
    run(started(2_000))
    with pytest.raises(ConfigError, match=r"one, two: the largest batches take 2000 bytes .* gives 1999"):
        run(started(1_999))


def test_all_that_the_embedding_engine_can_do_is_the_operators_to_set():
    ours = {"self", "served_name", "check_seconds", "returns_memory"}
    assert {one.name for one in fields(EmbeddingModel)} - {"name"} == {
        *signature(WorkerEmbedder).parameters
    } - ours
