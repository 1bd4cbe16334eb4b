"""What a replay says of the keys that it leaves as they were, and of what the log cannot show."""

from dataclasses import replace

import pytest

from benchmark_control_plane.decision_replay.replay_limits import cautions
from controlplane.config import parse
from controlplane.core.engine_reports import DeviceSharing
from tests.benchmark_control_plane.tuning.synthetic_blocks import traffic

MODELS = {"chat": {"model": "m", "engine": {"max_num_seqs": 8}}, "embeddings": [{"model": "e"}]}
LOGGED = {"models": MODELS, "quota": {"llm": {"nominal": 0.8}, "embedding": {"nominal": 0.2}}}


def recorded(sharing=DeviceSharing.BESIDE, pool_bytes=None):
    found = traffic([])
    machine = replace(found.machine, sharing=sharing, pool_bytes=pool_bytes)
    return replace(found, machine=machine, config={"config": LOGGED, "machine": {}})


def test_a_configuration_that_differs_only_in_what_is_replayed_needs_no_caution():
    other = parse({**LOGGED, "admission": {"max_waiting": 7}, "server": {"port": 1}})
    assert cautions(recorded(), other) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"models": {**MODELS, "chat": {"model": "m", "engine": {"max_num_seqs": 64}}}},
            "models.chat.engine.max_num_seqs: 64 is not replayed; it stays 8, as in the log",
        ),
        (
            {"models": {**MODELS, "embeddings": [{"model": "e", "batch_tokens": 512}]}},
            "models.embeddings.0.batch_tokens: 512 is not replayed; it stays its default, as in the log",
        ),
        (
            {"pool": {"memory": "1GiB"}},
            f"pool.memory: {2**30} is not replayed; it stays its default, as in the log",
        ),
        (
            {"quota": {"llm": {"nominal": 0.7}, "embedding": {"nominal": 0.2}}},
            "quota.llm.nominal: 0.7 is not replayed; it stays 0.8, as in the log",
        ),
    ],
)
def test_a_key_that_stays_as_in_the_log_is_named(change, says):
    assert cautions(recorded(), parse({**LOGGED, **change})) == [says]


def test_quotas_that_move_are_replayed():
    other = parse({**LOGGED, "quota": {"llm": {"nominal": 0.7}, "embedding": {"nominal": 0.3}}})
    assert cautions(recorded(pool_bytes=2**30), other) == []


@pytest.mark.parametrize("engine", ["off", {"decode_pacing": 0}])
def test_another_pacing_beside_passes_is_extrapolated(engine):
    other = parse({**LOGGED, "scheduling": {"engine": engine}})
    (line,) = cautions(recorded(), other)
    assert line.startswith(
        "decode pacing is 0 instead of 0.8: how much passes and steps slow each other down"
    )
    assert cautions(recorded(sharing=DeviceSharing.TURNS), other) == []
