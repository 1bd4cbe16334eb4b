"""A configuration is written out and read back unchanged, with its secrets masked or not."""

from pathlib import Path

import pytest

from controlplane.config import ConfigError, load, parse
from controlplane.config.documents import (
    digest_of,
    document_of,
    flattened,
    masked,
    merged,
    require_bounded,
    unmasked,
)

CONFIGS = sorted(Path("configs").glob("*.yaml"))
UNUSUAL = {
    "models": {
        "chat": {"model": "m", "restart": "never", "engine": {"api_key": "k", "list": [{"a": 1}, 2]}},
        "embeddings": [{"model": "e", "dimensions": [8, 16]}],
    },
    "scheduling": {"engine": "off"},
    "predictors": {"file": "lengths.npz"},
    "pool": {"memory": "1GiB"},
    "server": {"cors": ["https://app.example"], "admin_key_sha256": "a" * 64},
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_configuration_is_its_document(path):
    config = load(path)
    assert parse(document_of(config)) == config
    assert digest_of(parse(document_of(config))) == digest_of(config)


def test_values_that_yaml_reads_as_others_are_kept():
    config = parse(UNUSUAL)
    assert parse(document_of(config)) == config
    document = document_of(config)
    assert (document["scheduling"]["engine"], document["models"]["chat"]["restart"]) == ("off", "never")


def test_secrets_are_masked_and_restored():
    document = document_of(parse(UNUSUAL))
    shown = masked(document)
    assert shown["server"]["admin_key_sha256"] == shown["models"]["chat"]["engine"]["api_key"] == "***"
    assert shown["models"]["embeddings"][0]["batch_tokens"] == 16_384
    assert unmasked(shown, document) == document


@pytest.mark.parametrize("key", ["secret_key", "private_key", "passwd", "hf_token", "credential", "AUTH_KEY"])
def test_secrets_of_plug_ins_are_masked_by_the_end_of_their_key(key):
    present = {"options": {key: "hunter2", f"{key}s": ["hunter2", "b"], "batch_tokens": 5}}
    shown = masked(present)
    assert shown == {"options": {key: "***", f"{key}s": ["***1", "***2"], "batch_tokens": 5}}
    assert unmasked(shown, present) == present


@pytest.mark.parametrize("item", ["***", "***0", "***3", "***x", "***" + "9" * 5_000])
def test_a_mask_that_stands_for_nothing_is_an_error(item):
    with pytest.raises(ConfigError, match="stands for a secret of the present list, which has 2"):
        unmasked({"keys_sha256": [item]}, {"keys_sha256": ["a", "b"]})


def test_parts_are_merged_and_null_removes_entries_of_open_mappings_only():
    present = {"classes": {"a": {"ttft_ms": 1}, "b": {}}, "admission": {"engine_queue": 4, "explore": 0}}
    found = merged(
        present, {"classes": {"a": {"ttft_ms": None}, "b": None}, "admission": {"engine_queue": None}}
    )
    assert found == {"classes": {"a": {"ttft_ms": None}}, "admission": {"engine_queue": None, "explore": 0}}


def test_lists_of_sections_are_flattened_by_index():
    document = {"models": {"embeddings": [{"model": "e"}]}, "server": {"cors": ["*"]}}
    assert dict(flattened(document)) == {"models.embeddings.0.model": "e", "server.cors": ["*"]}


def test_a_masked_secret_stays_with_the_model_of_its_name():
    first, second = ({"model": name, "options": {"api_key": f"key of {name}"}} for name in "ab")
    present = {"models": {"embeddings": [first, second]}}
    left = masked({"models": {"embeddings": [second]}})
    assert unmasked(left, present) == {"models": {"embeddings": [second]}}
    renamed = {"models": {"embeddings": [{**second, "name": "c", "options": {"api_key": "***"}}]}}
    with pytest.raises(ConfigError, match="stands for a secret that is set"):
        unmasked(renamed, present)


def test_content_that_contains_itself_is_refused():
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="more than 100,000 values"):
        require_bounded(endless, source="change")
