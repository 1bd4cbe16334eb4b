"""A configuration for records that leave the machine holds no secret, and all else."""

import json

import orjson
import pytest

from controlplane.config import parse
from controlplane.config.redacted import redacted_values

MODELS = {"models": {"chat": {"model": "m"}}}


@pytest.mark.parametrize(
    "options",
    [
        {"api_keys": ["hunter2", {"of": "hunter2"}]},
        {"tokens": {"alice": "hunter2"}},
        {"nested": [{"credentials": {"user": "a", "value": ["hunter2"]}}]},
        {"password": 472_913},
        {"store": "redis://:hunter2@cache:6379/0"},
        {"url": "https://api.example/v1?key=hunter2&x=1"},
        {"url": "https://api.example/v1/#hunter2"},
    ],
)
def test_a_secret_is_removed_wherever_a_plug_in_takes_it(options):
    config = parse({**MODELS, "scheduling": {"ordering": "edf", "options": options}})
    found = redacted_values(config, lambda name: name)
    text = json.dumps(found)
    assert "hunter2" not in text and "472913" not in text
    assert parse(found).scheduling.options.keys() == options.keys()


def test_an_endpoint_loses_its_user_and_password():
    config = parse({**MODELS, "tracing": {"endpoint": "https://me:hunter2@otel.example:4318/v1/traces?t=x"}})
    found = redacted_values(config, lambda name: name)
    assert found["tracing"]["endpoint"] == "https://otel.example:4318/v1/traces"


def test_what_is_no_secret_stays():
    engine = {"max_num_batched_tokens": 64, "override_generation_config": {"eos_token_id": [1, 2]}}
    config = parse(
        {
            "models": {"chat": {"model": "org/m", "engine": engine, "lora_modules": {}}},
            "classes": {"keynote": {"default": True, "ttft_ms": 5}},
            "decision_log": {"dir": "/var/log/tandem"},
        }
    )
    found = redacted_values(config, lambda name: name)
    assert found["models"]["chat"] == {"model": "org/m", "engine": engine}
    assert found["classes"]["keynote"] == {"default": True, "ttft_ms": 5.0}
    assert found["decision_log"]["dir"] == "/var/log/tandem"


def test_an_integer_beyond_64_bits_is_a_text():
    engine = {"seed": 2**70, "least": -(2**63), "most": 2**64 - 1, "list": [{"of": -(2**63) - 1}], "on": True}
    config = parse({"models": {"chat": {"model": "m", "engine": engine}}})
    found = orjson.loads(orjson.dumps(redacted_values(config, lambda name: name)))
    assert found["models"]["chat"]["engine"] == {
        **engine,
        "seed": str(2**70),
        "list": [{"of": str(-(2**63) - 1)}],
    }
