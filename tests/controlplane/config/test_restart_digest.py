"""Which keys are part of the digest of what a running server does not take."""

from typing import Any

import pytest

from controlplane.config import parse
from controlplane.config.documents import merged
from controlplane.config.reconfigure import restart_digest

BASE: dict[str, Any] = {
    "models": {"chat": {"model": "llama"}, "embeddings": [{"model": "minilm"}]},
    "classes": {"quick": {"default": True}},
}


def digest(change: dict[str, Any]) -> str:
    return restart_digest(parse(merged(BASE, change)))


@pytest.mark.parametrize(
    "change",
    [
        {"classes": {"quick": {"weight": 3}}},
        {"models": {"embeddings": [{"model": "minilm"}, {"model": "bge"}]}},
        {"scheduling": {"engine": {"ordering": "fcfs"}}},
    ],
)
def test_a_live_key_is_no_part(change: dict[str, Any]) -> None:
    assert digest(change) == digest({})


@pytest.mark.parametrize(
    "change",
    [
        {"models": {"chat": {"engine": {"max_num_seqs": 8}}}},
        {"models": {"embeddings": []}},
        {"pool": {"margin": 0.2}},
        {"scheduling": {"engine": "off"}},
        {"quota": {"llm": {"nominal": 0.6}, "embedding": {"nominal": 0.4}}},
        {"server": {"port": 1}},
    ],
)
def test_a_key_that_needs_a_restart_is_part(change: dict[str, Any]) -> None:
    assert digest(change) != digest({})


@pytest.mark.parametrize(
    ("before", "is_part"),
    [
        ({}, True),
        ({"pool": {"kv_allocator": "kvcached"}}, False),
        ({"pool": {"kv_allocator": "kvcached"}, "quota": {"policy": "static"}}, True),
    ],
)
def test_quotas_that_do_not_move_are_divided_at_the_start(before: dict[str, Any], *, is_part: bool) -> None:
    shares = {"quota": {"llm": {"nominal": 0.6}, "embedding": {"nominal": 0.4}}}
    assert (digest(before) != digest(merged(before, shares))) is is_part
