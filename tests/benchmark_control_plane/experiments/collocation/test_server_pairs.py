"""All compared systems compute on the same device in the same type."""

import argparse
from pathlib import Path

import pytest
import yaml

from backends.bundled_models import MINILM
from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.experiments.collocation import embedding_throughput, plain_embeddings
from benchmark_control_plane.experiments.collocation.server_pairs import models_of
from benchmark_control_plane.experiments.collocation.server_pairs import plain_embeddings as naive
from controlplane.config import parse
from controlplane.config.models_section import EmbeddingModel
from controlplane.service.engine_builders import embedders_of

HALF = {"device": "cuda", "dtype": "float16"}
EXPERIMENT = Path(__file__).parents[4] / "configs" / "bench" / "head-to-head.yaml"


@pytest.fixture
def loaded(monkeypatch):
    """Options of each model that sentence-transformers loads."""
    seen = []

    def load(model, **options):
        seen.append(options)

    monkeypatch.setattr("sentence_transformers.SentenceTransformer", load)
    return seen


@pytest.mark.parametrize(
    ("section", "options"),
    [
        ({}, {"device": None, "trust_remote_code": False, "model_kwargs": {}}),
        (
            HALF | {"trust_remote_code": True},
            {"device": "cuda", "trust_remote_code": True, "model_kwargs": {"dtype": "float16"}},
        ),
    ],
)
def test_the_naive_embedder_uses_the_device_and_type_of_the_section(section, options, loaded, monkeypatch):
    monkeypatch.setattr("uvicorn.run", lambda app, **_: None)
    command = naive(EmbeddingModel(MINILM, **section), threads=2).command
    assert plain_embeddings.main(command[command.index(MINILM) :]) == 0
    assert loaded == [options]


def test_models_are_the_bundled_ones_or_those_of_an_experiment(tmp_path):
    small, named = models_of(None), models_of(EXPERIMENT)
    assert (small.chat.served_name, small.embedding.model) == ("tiny-llama", MINILM)
    assert named.embedding.batch_tokens == 4_096 and named.chat.engine["kv_cache_memory_bytes"] == 2**25
    simulated = yaml.safe_load((EXPERIMENT.parent / "load.yaml").read_text(encoding="utf-8"))
    path = tmp_path / "simulated.yaml"
    path.write_text(yaml.safe_dump(simulated), encoding="utf-8")
    with pytest.raises(BadInput, match="section `live` is missing"):
        models_of(path)


@pytest.mark.parametrize(
    ("has_gpu", "stated", "device", "dtype"),
    [
        (False, {}, "cpu", None),
        (True, {}, "cuda", "float16"),
        (True, {"device": "cpu"}, "cpu", None),
        (True, {"device": "cuda:1", "dtype": "bfloat16"}, "cuda:1", "bfloat16"),
    ],
)
def test_throughput_is_compared_on_one_device_in_one_type(
    has_gpu, stated, device, dtype, loaded, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    options = {"model": MINILM, "device": None, "dtype": None, "threads": 2} | stated
    model = embedding_throughput.model_from(argparse.Namespace(**options))
    (tandem,) = embedders_of(parse(embedding_throughput.tandem_config(model, "8GiB")))
    assert (tandem._options.device, tandem._options.dtype) == (device, dtype)
    embedding_throughput.encoder_of(model)
    assert loaded == [{"device": device, "model_kwargs": {"dtype": dtype} if dtype else {}}]
    command = embedding_throughput.infinity(Path("infinity_emb"), model).command
    assert command[command.index("--device") + 1] == device.partition(":")[0]
    assert command[-2:] == (["--dtype", dtype] if dtype else ["32", "--no-bettertransformer"])
