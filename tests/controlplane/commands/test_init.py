"""`tandem init`: the file passes `tandem check`, its keys are explained, and nothing is overwritten."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_origin

import pytest
import yaml

from backends.cost_models.roofline import gpu_by_name
from backends.device.named_devices import NAMED_DEVICES
from controlplane.cli import main
from controlplane.config import Config, load
from controlplane.config.commented_yaml import commented_yaml
from controlplane.config.loader import section_in
from controlplane.config.reference_pages import descriptions

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 32768, "vocab_size": 152064, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
BGE_M3 = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "max_position_embeddings": 8194, "vocab_size": 250002, "torch_dtype": "float32",
}  # fmt: skip


def model(folder: Path, config: dict, weight_bytes: int) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(weight_bytes)  # sparse
    return str(folder)


@pytest.fixture
def models(tmp_path: Path) -> tuple[str, str]:
    return model(tmp_path / "qwen", QWEN_7B, 15_231_233_024), model(tmp_path / "bge", BGE_M3, 2_271_064_456)


@pytest.mark.parametrize("device", ["h100-80", "a100-40", "l4-24", "v100-32"])
def test_file_for_a_named_device_passes_check(tmp_path, models, capsys, device):
    chat, embedding = models
    file = tmp_path / "my.yaml"
    assert main(["init", chat, "--embed", embedding, "--device", device, "--out", str(file)]) == 0
    config = load(file)
    assert main(["check", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.partition("\n")[2])
    plan = facts["memory_plan"]
    assert plan["memory_bytes"] == NAMED_DEVICES[device].gigabytes * 10**9
    assert plan["requests_at_once"][str(plan["max_model_tokens"])] >= 2
    assert facts["unused_keys"] == []
    dtype = config.models.chat.engine.get("dtype")
    assert (dtype == "float16") == (device == "v100-32")
    assert config.models.embeddings[0].device == "cuda"


@pytest.mark.parametrize("device", NAMED_DEVICES)
def test_small_models_with_a_reranker_fit_every_named_device(tmp_path, capsys, device):
    small = {**QWEN_7B, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2}  # fmt: skip
    chat = model(tmp_path / "chat", small, 988_000_000)
    embedding, ranker = (model(tmp_path / name, BGE_M3, 2_271_064_456) for name in ("bge", "ranker"))
    file = tmp_path / "my.yaml"
    command = ["init", chat, "--embed", embedding, "--rerank", ranker, "--device", device]
    assert main([*command, "--out", str(file)]) == 0
    capsys.readouterr()
    assert main(["check", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    plan = facts["memory_plan"]
    assert plan["requests_at_once"][str(plan["max_model_tokens"])] >= 8
    assert plan["workspace_bytes"] < plan["kv_bytes"]
    assert facts["unused_keys"] == []


def test_another_device_than_the_one_at_hand_is_not_compared_with_it(models, monkeypatch, capsys, caplog):
    monkeypatch.setattr("controlplane.service.preflight.probe.free_gpu_bytes", lambda: 8 * 2**30)
    chat, embedding = models
    assert main(["init", chat, "--embed", embedding, "--device", "h100-80"]) == 0
    assert "are free now" not in caplog.text


def meanings(section: Any, content: dict) -> Iterator[str]:
    """The meaning of each key in `content`, as docs/configuration.md has it."""
    kinds = {field.name: field.type for field in fields(section)}
    for key, value in content.items():
        yield descriptions(section)[key].replace("`", "")
        inner = section_in(kinds[key])
        if inner is not None:
            is_named = get_origin(kinds[key]) is Mapping
            for item in value.values() if is_named else value if isinstance(value, list) else [value]:
                yield from meanings(inner, item)


def test_every_key_of_ours_has_its_meaning_once(tmp_path, models, capsys):
    chat, embedding = models
    assert main(["init", chat, "--embed", embedding, "--rerank", embedding + "/", "--device", "h100-80"]) == 2
    assert "names two models" in capsys.readouterr().err
    assert main(["init", chat, "--embed", embedding, "--device", "h100-80"]) == 0
    text = capsys.readouterr().out
    for meaning in (
        "# Objective for the time to first token; none",
        "# Folder or Hugging Face name.",
    ):
        assert text.count(meaning) == 1
    comments = " ".join(line.strip().removeprefix("# ") for line in text.splitlines() if "# " in line)
    expected = set(meanings(Config, yaml.safe_load(text)))
    assert len(expected) > 25
    assert {meaning for meaning in expected if meaning not in comments} == set()
    assert yaml.safe_load(text)["classes"]["standard"]["default"] is True


def test_facts_are_those_of_check(tmp_path, models, capsys):
    chat, embedding = models
    file = tmp_path / "my.yaml"
    command = ["init", chat, "--embed", embedding, "--device", "h100-80", "--json"]
    assert main([*command, "--out", str(file)]) == 0
    written = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    printed = json.loads(capsys.readouterr().out)
    assert written.pop("file") == str(file) and printed.pop("yaml") == file.read_text(encoding="utf-8")
    assert main(["check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == written == printed


def test_existing_file_is_kept_unless_forced(tmp_path, models, capsys):
    chat, embedding = models
    file = tmp_path / "my.yaml"
    file.write_text("mine\n", encoding="utf-8")
    command = ["init", chat, "--embed", embedding, "--device", "h100-80", "--out", str(file)]
    assert main(command) == 2
    assert capsys.readouterr().err == f"{file}: exists; choose another --out, or overwrite it with --force\n"
    assert file.read_text(encoding="utf-8") == "mine\n"
    assert main([*command, "--force"]) == 0
    assert load(file).models.chat.model == chat


@pytest.mark.parametrize(
    ("device", "message"),
    [("t4-16", "leave no memory for the cache"), ("h99", "--device h99: unknown; choose one of b200-180")],
)
def test_device_that_does_not_do(models, capsys, device, message):
    chat, embedding = models
    assert main(["init", chat, "--embed", embedding, "--device", device]) == 2
    assert message in capsys.readouterr().err


def test_model_that_is_nowhere_is_named(models, capsys):
    assert main(["init", models[0], "--embed", "nobody/no-such-model"]) == 2
    assert "model 'nobody/no-such-model': neither a local folder nor readable" in capsys.readouterr().err


def test_host_without_a_gpu_gets_what_the_models_can_use(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("controlplane.service.preflight.probe.gpu_name", lambda: None)
    monkeypatch.setattr("controlplane.service.preflight.probe.memory_bytes", lambda: 16 * 2**30)
    tiny = {
        **QWEN_7B,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 2048,
    }
    small = {**BGE_M3, "hidden_size": 384, "intermediate_size": 1536, "max_position_embeddings": 512}
    chat, embedding = model(tmp_path / "a", tiny, 5_000_000), model(tmp_path / "b", small, 90_000_000)
    assert main(["init", chat, "--embed", embedding]) == 0
    content = yaml.safe_load(capsys.readouterr().out)
    assert content["pool"]["memory"] in ("2GiB", "3GiB")
    assert content["models"]["embeddings"][0]["threads"] == 1
    assert content["models"]["chat"]["engine"]["max_model_len"] == 4096


def test_devices_have_a_roofline():
    for name, device in NAMED_DEVICES.items():
        assert gpu_by_name(device.driver_name) is not None, name


def test_comments_are_wrapped_and_text_survives():
    content = {"models": {"chat": {"model": "on: off", "name": "1"}}, "server": {"port": 8000}}
    text = commented_yaml(content, {"models.chat.name": "word " * 60})
    assert yaml.safe_load(text) == content
    assert max(map(len, text.splitlines())) <= 110
