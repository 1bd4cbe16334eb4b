"""Config and weight sizes of a model, from its folder or from the hub's local cache."""

from pathlib import Path

import pytest

from controlplane.config import ConfigError
from controlplane.service.engine_builders import model_facts
from controlplane.service.memory.memory_plan import ModelFacts

CONFIG = b'{"max_position_embeddings": 512}'


def written(folder: Path, sizes: dict[str, int] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(CONFIG)
    for name, size in (sizes or {}).items():
        (folder / name).write_bytes(bytes(size))
    return folder


def test_one_of_several_weight_formats_counts(tmp_path):
    halves = {"model-1-of-2.safetensors": 5, "model-2-of-2.safetensors": 6}
    facts = model_facts(str(written(tmp_path / "both", {**halves, "consolidated.safetensors": 11})))
    assert (facts.weight_bytes, facts.context_tokens) == (11, 512)
    assert model_facts(str(written(tmp_path / "own", {"adapted.safetensors": 3}))).weight_bytes == 3
    bins = {"pytorch_model.bin": 7, "optimizer.bin": 14}
    assert model_facts(str(written(tmp_path / "bins", bins))).weight_bytes == 7


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "float32", 200),
        ({"dtype": "torch.float16"}, "bfloat16", 100),
        ({"dtype": "bfloat16"}, "auto", 100),
        ({"dtype": "float32"}, "float16", 100),
        ({"dtype": "bfloat16"}, None, 100),
        ({}, "float32", 100),
        ({"dtype": "bfloat16", "quantization_config": {"bits": 4}}, "float32", 100),
    ],
)
def test_weights_loaded_in_a_wider_type_take_more(config, dtype, expected):
    assert ModelFacts(config, 100).loaded_bytes(dtype) == expected


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "not valid JSON"), (b"[1]", "not a JSON object"), (b"\xff", "JSON")]
)
def test_an_unreadable_config_is_named(tmp_path, content, message):
    written(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}.*; download the model again"):
        model_facts(str(tmp_path))


def test_a_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json; name a folder"):
        model_facts(str(tmp_path))


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def in_cache(cache: Path, sizes: dict[str, int] | None = None) -> None:
    """Writes a model in the layout of the hub's client."""
    repository = cache / "models--some--model"
    written(repository / "snapshots" / "0a", sizes)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0a", encoding="utf-8")


def test_the_local_cache_serves_without_a_network(hub_cache):
    in_cache(hub_cache, {"model.safetensors": 9})
    facts = model_facts("some/model")
    assert (facts.weight_bytes, facts.context_tokens) == (9, 512)


def test_a_cached_config_without_weights_is_an_error(hub_cache):
    in_cache(hub_cache)
    with pytest.raises(ConfigError, match="the local cache holds no weights; run `hf download some/model`"):
        model_facts("some/model")


def test_an_unreachable_model_is_an_error_with_its_cause(hub_cache):
    with pytest.raises(ConfigError, match=r"'some/model': neither a local folder.*HF_TOKEN.*reports: .+"):
        model_facts("some/model")
