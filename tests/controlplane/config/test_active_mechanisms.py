"""Which mechanisms are active, and which keys do nothing, with the reason."""

from dataclasses import fields

import pytest

from controlplane.config import Config, ConfigError, parse
from controlplane.config.active_mechanisms import IDLE, mechanisms, unused_keys
from controlplane.config.reference_pages import sections

CHAT = {"chat": {"model": "m"}}
BOTH = {**CHAT, "embeddings": [{"model": "e"}]}
MOVING = {"policy": "dynamic", "llm": {"nominal": 0.7, "min": 0.3}, "embedding": {"nominal": 0.3}}
KVCACHED = {"kv_allocator": "kvcached"}
DIGEST = "0" * 64
# Keys that act whatever the other keys are, and keys that are sections.
UNCONDITIONAL = {
    "admission": "max_wait_ms max_waiting",
    "decision_log": "dir",
    "tracing": "endpoint",
    "classes.NAME": "default e2e_ms priority sheddable ttft_ms",
    "log": "access format level repeat_ms",
    "models": "chat embeddings rerankers",
    "models.chat": "backend engine hybrid_cache lora_modules model name reasoning_parser restart stall_ms "
    "tool_parser tool_strictness",
    "models.chat.restart": "attempts backoff_ms window_ms",
    "models.embeddings[]": "backend batch_tokens device dimensions dtype max_input_tokens max_running model "
    "name normalize stall_ms threads trust_remote_code",
    "models.rerankers[]": "batch_tokens device dtype max_input_tokens max_running model name "
    "stall_ms threads trust_remote_code",
    "pool": "activation kv_allocator margin memory monitor_ms reserve",
    "quota": "embedding forecast llm",
    "scheduling": "ordering",
    "scheduling.engine": "ordering",
    "server": "admin_key_sha256 cors drain_ms health_port host limits metrics_key_sha256 open "
    "overload_status port router_key_sha256 stalled_client_ms vllm_metric_names",
    "server.limits": "body_memory body_timeout_ms grammar_memory grammar_ms grammar_processes "
    "grammar_step_ms header_timeout_ms idle_timeout_ms inline_body max_answer_values max_body max_depth "
    "max_grammar max_image_bytes max_image_pixels max_images "
    "max_grammar_choices max_grammar_properties max_grammar_repeat max_header_bytes max_headers max_members "
    "max_name max_pair_tokens max_queue_delay_ms max_schema max_strings max_values tokenizer_threads",
    "tenants.NAME": "api_keys_sha256 classes requests_per_minute tokens_per_minute",
}


def test_each_key_is_conditional_with_a_reason_or_unconditional():
    known = {f"{path}.{key.name}" for path, section in sections(Config, "") for key in fields(section)}
    conditional = {key for row in IDLE for key in row.keys}
    unconditional = {f"{path}.{name}" for path, names in UNCONDITIONAL.items() for name in names.split()}
    assert conditional | unconditional == known
    assert not conditional & unconditional


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"models": BOTH, "quota": {"tick_ms": 60}}, ["quota.tick_ms=60.0 does nothing: quotas are static"]),
        ({"models": BOTH, "quota": {"critical_ms": 9, "forecast": {"window_ms": 5}}},
         ["quota.forecast.window_ms=5.0", "quota.critical_ms=9.0"]),
        ({"models": BOTH, "quota": {"llm": {"nominal": 0.9, "min": 0.5}}},
         ["quota.llm.min=0.5 does nothing: quotas are static; they move with pool.kv_allocator: kvcached"]),
        ({"models": CHAT, "quota": {"policy": "dynamic"}}, ["quota.policy='dynamic' does nothing: only"]),
        ({"models": CHAT,
          "scheduling": {"engine": {"ordering": "edf", "decode_pacing": 0.5, "preempt_ratio": 2.0}}},
         ["scheduling.engine.decode_pacing=0.5", "scheduling.engine.preempt_ratio=2.0"]),
        ({"models": CHAT, "scheduling": {"engine": {"ordering": "srmt", "look_ahead": "all"}}},
         ["scheduling.engine.look_ahead='all'"]),
        ({"models": CHAT, "admission": {"length_predictor": "history"}, "predictors": {"max_examples": 300}},
         ["predictors.max_examples=300"]),
        ({"models": CHAT, "admission": {"tpot_guard": False}}, ["admission.tpot_guard=False does nothing"]),
        ({"models": CHAT, "admission": {"explore": 0.02}, "scheduling": {"engine": "off"}},
         ["admission.explore=0.02 does nothing: with scheduling.engine: off"]),
        ({"models": {"embeddings": [{"model": "e"}]}, "admission": {"explore": 0.02}},
         ["admission.explore=0.02 does nothing: no chat model is served"]),
        ({"models": CHAT, "classes": {"a": {"weight": 2, "default": True}},
          "scheduling": {"engine": {"ordering": "edf"}}},
         ["classes.a.weight=2.0 does nothing: only the engine orderings srmt and apt"]),
        ({"models": CHAT, "tenants": {"one": {"api_keys_sha256": [DIGEST], "weight": 2}}},
         ["tenants.one.weight=2.0 does nothing: there is only one tenant"]),
        ({"models": {**CHAT, "embeddings": [{"model": "e", "device": "cuda", "idle_cpu_priority": True}]}},
         ["models.embeddings.0.idle_cpu_priority=True"]),
        ({"models": CHAT, "scheduling": {"ordering": "fcfs", "default_deadline_ms": 5}},
         ["scheduling.default_deadline_ms=5.0 does nothing: the order of arrival"]),
        ({"models": CHAT, "decision_log": {"sample": 1}},
         ["decision_log.sample=1.0 does nothing: nothing is logged"]),
        ({"models": CHAT, "tracing": {"sample": 1}},
         ["tracing.sample=1.0 does nothing: nothing is traced"]),
        ({"models": {"embeddings": [{"model": "e"}]}, "scheduling": {"engine": {"ordering": "edf"}}},
         ["scheduling.engine={'ordering': 'edf'} does nothing: no chat model is served"]),
    ],
)  # fmt: skip
def test_a_key_without_effect_is_named_with_the_reason(content, expected):
    found = unused_keys(parse(content))
    assert len(found) == len(expected), found
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize(
    "content",
    [
        {"models": CHAT},
        {
            "models": CHAT,
            "admission": {"explore": 0.02},
            "scheduling": {"engine": {"ordering": "srmt"}},
            "classes": {"a": {"weight": 2, "gap_ms": 500, "default": True}},
        },
        # Passes are priced by the weights of the SLOs that they break.
        {
            "models": BOTH,
            "classes": {"a": {"weight": 2, "default": True}},
            "scheduling": {"engine": {"ordering": "edf"}},
        },
        {"models": BOTH, "classes": {"a": {"weight": 2, "default": True}}, "scheduling": {"engine": "off"}},
        {"models": BOTH, "quota": MOVING | {"tick_ms": 60, "critical_ms": 9}, "pool": KVCACHED},
        {"models": BOTH, "scheduling": {"engine": {"ordering": "srmt", "urgency": 0.2, "decode_pacing": 0}}},
    ],
)
def test_a_key_with_effect_or_at_its_default_is_not_named(content):
    assert unused_keys(parse(content)) == []


def test_mechanisms_that_are_off_state_the_reason():
    plain = {"models": BOTH, "scheduling": {"engine": "off"}}
    off = {each.name: each.reason for each in mechanisms(parse(plain)) if not each.is_active}
    assert "static quotas only" in off["engine ordering"]
    assert off["moving quotas"] == "scheduling.engine: off; vLLM's own scheduler enforces no quota"
    assert off["TPOT guard"] == "no class has tpot_ms"
    served = {"models": BOTH, "pool": KVCACHED, "scheduling": {"engine": {"ordering": "srmt"}}}
    on = {each.name: each.reason for each in mechanisms(parse(served)) if each.is_active}
    assert on["engine ordering"] == "scheduling.engine.ordering: srmt"
    assert on.keys() >= {"moving quotas", "decode pacing", "load forecast", "memory monitor"}


@pytest.mark.parametrize("quota", [MOVING, {"llm": {"nominal": 0.9, "borrow": 0.1}}])
def test_quotas_that_are_asked_to_change_need_an_engine_policy_and_memory_that_moves(quota):
    with pytest.raises(ConfigError, match=r"cannot change, scheduling\.engine: off.*remove quota\.policy"):
        parse({"models": BOTH, "quota": quota, "pool": KVCACHED, "scheduling": {"engine": "off"}})
    with pytest.raises(ConfigError, match=r"cannot change, pool\.kv_allocator: static"):
        parse({"models": BOTH, "quota": quota})
