from dataclasses import replace
from pathlib import Path

import pytest

from backends.vllm.hybrid import support
from controlplane.config import ConfigError, load
from controlplane.service.memory.memory_plan import ModelFacts, hybrid_choice, hybrid_text, memory_plan

OPT = {
    "architectures": ["OPTForCausalLM"], "hidden_size": 1024, "num_attention_heads": 16,
    "num_hidden_layers": 4, "max_position_embeddings": 2048, "dtype": "float16",
}  # fmt: skip
GROUPED = OPT | {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4}


def _config(
    tmp_path: Path, hybrid: str, *, engine: str = "{}", model_engine: str = "{}", activation: str = "0"
):
    path = tmp_path / "tandem.yaml"
    path.write_text(
        f"""
models:
  chat: {{model: some/model, hybrid_cache: {hybrid}, engine: {model_engine}}}
pool: {{memory: 1GiB, activation: {activation}, reserve: 0}}
quota: {{llm: {{nominal: 1.0}}, embedding: {{nominal: 0.0}}}}
scheduling: {{engine: {engine}}}
classes: {{any: {{priority: 1, default: true}}}}
""",
        encoding="utf-8",
    )
    return load(path)


def _facts(config):
    return lambda name: ModelFacts(config, 1 << 28)


# YAML 1.1 reads two of the three words as booleans.
@pytest.mark.parametrize(("setting", "forms"), [("off", None), ("auto", "auto"), ("on", "on")])
def test_the_configured_value_decides(tmp_path, setting, forms):
    setup = hybrid_choice(_config(tmp_path, setting), _facts(OPT), support)
    assert (setup and setup.forms) == forms


def test_auto_keeps_to_keys_and_values_where_hidden_states_save_nothing(tmp_path):
    assert hybrid_choice(_config(tmp_path, "auto"), _facts(GROUPED), support) is None


def test_on_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"hybrid_cache=on: h=2: .*; choose auto or off"):
        hybrid_choice(_config(tmp_path, "on"), _facts(GROUPED), support)


def test_hidden_states_need_the_scheduler_plugin(tmp_path):
    with pytest.raises(ConfigError, match=r"hybrid_cache=auto: .* remove scheduling.engine: off"):
        hybrid_choice(_config(tmp_path, "auto", engine="off"), _facts(OPT), support)


@pytest.mark.parametrize(("setting", "verb"), [("off", "would take"), ("auto", "take")])
def test_the_text_states_the_saving(tmp_path, setting, verb):
    config = _config(tmp_path, setting)
    plan = memory_plan(config, _facts(OPT), lambda: 1 << 30, support)
    text = hybrid_text(config, _facts(OPT), plan, support)
    plain, hidden = plan.concurrent(2048), plan.kv_blocks // (2048 // 32)
    assert f"{setting}; hidden states {verb} 0.5 of the memory" in text
    assert f"{hidden:,} instead of {plain:,} requests of 2,048 tokens" in text


def test_the_text_names_alternatives_for_grouped_query_attention(tmp_path):
    config = _config(tmp_path, "auto")
    plan = memory_plan(config, _facts(GROUPED), lambda: 1 << 30, support)
    eight = _config(tmp_path, "auto", model_engine="{kv_cache_dtype: fp8}")
    chosen = memory_plan(eight, _facts(GROUPED), lambda: 1 << 30, support)
    text = hybrid_text(config, _facts(GROUPED), plan, support)
    assert "h=2" in text
    assert "engine {kv_cache_dtype: fp8}: keys and values in 8 bits take 0.5 of the memory" in text
    # The stated numbers are those of the plan with these arguments.
    assert chosen.kv_blocks == 2 * plan.kv_blocks
    assert f"{chosen.concurrent(2048)} instead of {plan.concurrent(2048)} requests of 2,048 tokens" in text
    assert "lossy" in text
    assert "instead" not in hybrid_text(eight, _facts(GROUPED), chosen, support)


def test_the_text_states_why_hidden_states_are_refused(tmp_path):
    config = _config(tmp_path, "auto", model_engine="{tensor_parallel_size: 2}")
    plan = memory_plan(config, _facts(OPT), lambda: 1 << 30, support)
    assert "tensor_parallel_size=2" in hybrid_text(config, _facts(OPT), plan, support)
    without = replace(plan, geometry=None)
    assert hybrid_text(config, _facts(OPT), without, support) is None


def test_the_activation_covers_decoding_from_hidden_states(tmp_path):
    """With short prefills, decoding takes more than the MLP. Computed by hand: 128 requests
    of 2,048 tokens and 16 heads take 50,331,648 bytes, an MLP of 512 tokens 8,388,608."""
    few = "{max_num_batched_tokens: 512, max_num_seqs: 128}"
    plans = {
        setting: memory_plan(
            _config(tmp_path, setting, model_engine=few, activation="auto"),
            _facts(OPT),
            lambda: 1 << 30,
            support,
        )
        for setting in ("off", "auto")
    }
    assert plans["auto"].activation_bytes - plans["off"].activation_bytes == 50_331_648 - 8_388_608
