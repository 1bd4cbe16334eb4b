"""Every key of the configuration states whether a running server takes a new value."""

from dataclasses import fields

import pytest

from controlplane.config.live_keys import LIVE, RESTART, WITH_MOVING_QUOTAS, Taken, taken
from controlplane.config.loader import section_in
from controlplane.config.reference_pages import sections
from controlplane.config.root import Config

ENTRIES = [*LIVE, *RESTART, *WITH_MOVING_QUOTAS]
# Sections whose keys are all alike; a new key elsewhere needs an entry of its own.
ALIKE = {
    "models.chat",
    "models.embeddings",
    "models.rerankers",
    "pool",
    "predictors",
    "classes",
    "tenants",
    "scheduling",
    "log",
    "tracing",
    "quota.llm",
    "quota.embedding",
}


def keys() -> list[str]:
    """Every key with its path as in a document, names of entries left out."""
    return [
        f"{path}.{key.name}".replace(".NAME", "").replace("[]", "")
        for path, section in sections(Config, "")
        for key in fields(section)
        if section_in(key.type) is None
    ]


def test_every_key_has_one_entry_and_every_entry_a_key():
    assert len(set(ENTRIES)) == len(ENTRIES)
    plain = {entry for entry in ENTRIES if entry not in ALIKE}
    assert set(ENTRIES) & ALIKE == ALIKE
    own = {key for key in keys() if not any(key.startswith(f"{section}.") for section in ALIKE)}
    assert own == plain


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("classes.batch.ttft_ms", Taken.LIVE),
        ("scheduling.engine.urgency", Taken.LIVE),
        ("models.embeddings.0.batch_tokens", Taken.LIVE),
        ("models.chat.model", Taken.RESTART),
        ("quota.llm.nominal", Taken.WITH_MOVING_QUOTAS),
    ],
)
def test_a_value_belongs_to_its_longest_entry(path, expected):
    assert taken(path) is expected


def test_an_unknown_key_is_an_error():
    with pytest.raises(KeyError, match="add one"):
        taken("server.new_key")
