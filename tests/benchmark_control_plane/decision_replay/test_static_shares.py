"""Static shares of the memory decide the sizes of a replayed machine; `tandem tune` tries those that fit."""

from dataclasses import replace

import pytest

from benchmark_control_plane.decision_replay.replay_limits import cautions
from benchmark_control_plane.decision_replay.static_shares import LLM_SHARE, decide_sizes, with_shares
from benchmark_control_plane.tuning.evaluation import replayed
from benchmark_control_plane.tuning.search_space import candidate, search_space, value_of, with_value
from benchmark_control_plane.tuning.tune_command import share_values
from controlplane.config import ConfigError, parse
from tests.benchmark_control_plane.tuning.synthetic_blocks import CONTENT, REQUESTS, block, served, traffic

SPLIT = {**CONTENT, "pool": {}, "quota": {"llm": {"nominal": 0.5}, "embedding": {"nominal": 0.5}}}
TOKEN, PASS_BYTES = 1_024, 4_096 * 1_024
FACTS = {"workspace_bytes": 4 * PASS_BYTES, "generators": {"m": {}}, "embedders": {"e": {}}}


def recorded(found=None, facts=FACTS, content=SPLIT):
    """Half of the memory for 20,000 KV cells, the other half for four passes."""
    found = traffic([]) if found is None else found
    machine = replace(
        found.machine, kv_bytes=20_000 * TOKEN, max_model_tokens=8_000, embed_batch_tokens=4_096,
        workspace_batches=4,
    )  # fmt: skip
    config = {"config": content, "machine": facts}
    return replace(found, machine=machine, config=config, sections=served(content))


def with_share(value):
    return served(with_value(SPLIT, LLM_SHARE, value))


def test_each_size_changes_as_its_share_does():
    log = recorded()
    assert with_shares(log, log.machine, log.sections) is log.machine
    other = {**log.sections, "quota": {**log.sections["quota"], "max_step": 0.2}}
    assert with_shares(log, log.machine, other) is log.machine
    found = with_shares(log, log.machine, with_share(0.7))
    assert found == replace(log.machine, kv_bytes=28_000 * TOKEN, workspace_batches=pytest.approx(2.4))
    # With smaller passes the same workspace holds more of them.
    smaller = replace(log.machine, embed_batch_tokens=1_024, workspace_batches=16)
    assert with_shares(log, smaller, with_share(0.7)).workspace_batches == pytest.approx(9.6)


@pytest.mark.parametrize(
    ("share", "says"),
    [
        (0.1, "quota.llm.nominal: gives 4,096,000 bytes"),
        (0.9, "quota.embedding.nominal: gives 3,355,443 bytes"),
    ],
)
def test_memory_for_less_than_one_request_or_pass_is_refused(share, says):
    log = recorded()
    with pytest.raises(ConfigError, match=says):
        with_shares(log, log.machine, with_share(share))


@pytest.mark.parametrize(
    "change",
    [
        {"content": {**SPLIT, "pool": {"kv_allocator": "kvcached"}}},
        {"content": with_value(SPLIT, "models.chat.engine.kv_cache_memory_bytes", 20_000 * TOKEN)},
        {"facts": {**FACTS, "embedders": {}}},
    ],
)
def test_shares_that_decide_no_size_change_none(change):
    log = recorded(**change)
    assert not decide_sizes(log)
    assert with_shares(log, log.machine, with_share(0.7)) is log.machine
    assert share_values(log, parse(SPLIT), with_share) == {}
    named = [line.partition(":")[0] for line in cautions(log, parse(with_value(SPLIT, LLM_SHARE, 0.7)))]
    assert named[-2:] == ["quota.embedding.nominal", "quota.llm.nominal"]


def test_the_search_tries_the_shares_that_fit():
    log, config = recorded(), parse(SPLIT)
    shares = share_values(log, config, with_share)
    assert shares == {LLM_SHARE: [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]}
    space = search_space(SPLIT, has_quotas=False, budgets=shares)
    own = space.own()
    assert [key for key in space.values if key.startswith("quota.")] == [LLM_SHARE]
    changes = candidate(space, lambda key, values: 0 if key == LLM_SHARE else own[key])
    assert changes == {LLM_SHARE: 0.3}
    assert value_of(parse(space.changed(changes)), "quota.embedding.nominal") == 0.7
    assert cautions(log, parse(space.changed(changes))) == []
    stated = parse(with_value(SPLIT, "models.chat.engine.kv_cache_memory_bytes", 2**24))
    assert share_values(log, stated, with_share) == {}


@pytest.mark.long
def test_a_replay_with_less_memory_serves_fewer_requests():
    found = block()
    machine = replace(found.traffic.machine, kv_bytes=10 * 16 * TOKEN, max_model_tokens=16)
    log = replace(recorded(found.traffic), machine=replace(machine, embed_batch_tokens=4_096))
    # Requests of one block each; the smallest share holds one block.

    def served_requests(share):
        result = replayed(replace(found, traffic=log), with_share(share))
        assert result.refused is None
        return sum(each.is_served for each in result.requests)

    assert served_requests(0.06) < served_requests(0.5) == REQUESTS
    assert replayed(replace(found, traffic=log), with_share(0.9)).refused
