"""What `tandem check` knows of bundled models that have not been built, against the built ones."""

import json
from collections.abc import Mapping
from functools import partial

import pytest

from backends import bundled_models
from controlplane.cli import main
from controlplane.config import ConfigError, parse
from controlplane.config.models_section import EmbeddingModel
from controlplane.service import engine_builders, preflight
from controlplane.service.bootstrap import assemble
from controlplane.service.memory import model_config
from controlplane.service.memory.memory_plan import ModelFacts

NAMES = [bundled_models.PREFIX + name for name in bundled_models.MODELS]
CHATS = [name for name in NAMES if name != "tandem/tiny-cross-encoder"]


def stated(recipe: Mapping[str, object], built: Mapping[str, object]) -> dict[str, object]:
    """The values of `built` under the keys of `recipe`, also in its sections."""
    found = {}
    for key, value in recipe.items():
        found[key] = stated(value, built[key]) if isinstance(value, Mapping) else built.get(key)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_built_model_is_as_its_recipe_states(name):
    pytest.importorskip("transformers")
    tiny = bundled_models.tiny_model(name)
    built = model_config.model_facts(bundled_models.resolve(name))
    # transformers writes the labels in their place.
    recipe = {key: value for key, value in tiny.config.items() if key != "num_labels"}
    assert (stated(recipe, built.config), built.weight_bytes) == (recipe, tiny.weight_bytes)


@pytest.mark.long
@pytest.mark.parametrize("chat", CHATS)
def test_check_builds_no_model_and_prints_what_it_prints_of_the_built_one(
    chat, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("transformers")
    file = tmp_path / "my.yaml"
    rerankers = "[{model: tandem/tiny-cross-encoder, dtype: float32}]"
    file.write_text(
        f"models: {{chat: {{model: {chat}, hybrid_cache: auto}}, rerankers: {rerankers}}}\n"
        "pool: {memory: 2GiB}\n",
        encoding="utf-8",
    )
    with monkeypatch.context() as changed:
        changed.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
        assert main(["check", str(file), "--json"]) == 0
        assert not (tmp_path / "cache").exists()
    of_recipes = json.loads(capsys.readouterr().out)

    def built_facts(name: str) -> ModelFacts:
        return model_config.model_facts(bundled_models.resolve(name))

    monkeypatch.setattr(preflight, "model_facts", built_facts)
    assert main(["check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == of_recipes


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_step_costs_are_those_of_the_built_model(name):
    pytest.importorskip("transformers")
    built = model_config.model_facts(bundled_models.resolve(name))
    known = engine_builders.model_facts(name)
    device = preflight.device_facts("h100-80")
    assert known.context_tokens == built.context_tokens
    assert device.step_cost(known, 2_048) == device.step_cost(built, 2_048)
    workspace = partial(
        preflight.estimated_workspace_bytes, batch_tokens=8_192, max_input_tokens=512, bytes_per_element=4
    )
    assert workspace(known) == workspace(built)


def test_an_unknown_bundled_name_is_refused():
    with pytest.raises(ConfigError, match=r"models: model tandem/tiny-gpt: no such bundled model"):
        engine_builders.model_facts("tandem/tiny-gpt")


def test_a_model_that_cannot_be_built_stops_the_start_before_an_engine_does(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file"))
    content = {
        "models": {"rerankers": [{"model": "tandem/tiny-cross-encoder"}]}, "pool": {"memory": "1GiB"},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"models: cannot build tandem/tiny-cross-encoder .*TANDEM_CACHE"):
        assemble(parse(content))


async def test_a_worker_that_a_change_adds_finds_its_model_built(tmp_path, monkeypatch):
    """Building it with the worker would stop the event loop for seconds."""
    asked = []
    monkeypatch.setattr(bundled_models, "resolve", lambda name: asked.append(name) or str(tmp_path))
    needs = await engine_builders.worker_needs(EmbeddingModel(model="tandem/tiny-cross-encoder"))
    assert asked == ["tandem/tiny-cross-encoder"]
    assert needs.weight_bytes == bundled_models.MODELS["tiny-cross-encoder"].weight_bytes
