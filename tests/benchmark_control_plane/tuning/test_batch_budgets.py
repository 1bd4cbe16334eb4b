"""Batch budgets are searched where the simulator models them, and change the device that a replay runs on."""

from dataclasses import replace

import pytest

from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.tuning.batch_budgets import (
    BUDGETS,
    PASS_TOKENS,
    PLACES,
    SECTION,
    STEP_TOKENS,
    budget_values,
    check_budgets,
    with_budgets,
)
from benchmark_control_plane.tuning.evaluation import LOAD, replayed
from benchmark_control_plane.tuning.search_space import candidate, search_space, value_of, with_value
from controlplane.config import ConfigError, parse
from tests.benchmark_control_plane.tuning.synthetic_blocks import CONTENT, block, served

STATED = {
    **CONTENT,
    "models": {
        "chat": {"model": "m", "engine": {"max_num_seqs": 64, "max_num_batched_tokens": 4_096}},
        "embeddings": [{"model": "e", "batch_tokens": 8_192}],
    },
}
MACHINE = Machine(
    lambda load: 0.01, max_running=64, step_tokens=700, embed_batch_tokens=4_096, embed_input_tokens=512,
    workspace_batches=2,
)  # fmt: skip


def test_budgets_of_tokens_become_smaller_and_places_more_too():
    assert budget_values(parse(STATED), MACHINE) == {
        STEP_TOKENS: (128, 256, 512, 4_096),
        PLACES: (8, 16, 32, 64, 128, 256),
        PASS_TOKENS: (512, 1_024, 2_048, 8_192),
    }


def test_a_budget_that_is_not_stated_or_not_the_logs_is_not_tried():
    assert budget_values(parse(CONTENT), MACHINE).keys() == {PASS_TOKENS}
    other = replace(MACHINE, max_running=32, step_tokens=8_192, embed_batch_tokens=16_384)
    assert budget_values(parse(STATED), other) == {}
    whole_prompts = with_value(STATED, "models.chat.engine.enable_chunked_prefill", False)
    assert STEP_TOKENS not in budget_values(parse(whole_prompts), MACHINE)
    two = {**STATED, "models": {**STATED["models"], "rerankers": [{"model": "r"}]}}
    assert PASS_TOKENS not in budget_values(parse(two), MACHINE)


def test_places_are_not_more_than_the_tokens_of_a_step():
    only_places = {**STATED, "models": {"chat": {"model": "m", "engine": {"max_num_seqs": 1_024}}}}
    machine = replace(MACHINE, max_running=1_024)
    # By vLLM's default of at least 2,048 tokens.
    assert budget_values(parse(only_places), machine)[PLACES] == (128, 256, 512, 1_024, 2_048)
    few = with_value(STATED, STEP_TOKENS, 100)
    assert budget_values(parse(few), MACHINE)[PLACES] == (8, 16, 32, 64)


def test_the_search_changes_one_budget_and_refuses_what_vllm_would():
    budgets = budget_values(parse(STATED), MACHINE)
    space = search_space(STATED, has_quotas=True, budgets=budgets)
    own = space.own()
    for key in BUDGETS:
        assert space.values[key][own[key]] == value_of(parse(STATED), key) == budgets[key][own[key]]
        changes = candidate(space, lambda name, values, key=key: 0 if name == key else own[name])
        assert changes == {key: budgets[key][0]}
        assert value_of(parse(space.changed(changes)), key) == budgets[key][0]
    few_tokens_many_places = {**own, STEP_TOKENS: 0, PLACES: len(budgets[PLACES]) - 1}
    with pytest.raises(
        ConfigError, match=r"max_num_batched_tokens=128: vLLM needs at least .*max_num_seqs=256"
    ):
        candidate(space, lambda name, values: few_tokens_many_places[name])
    check_budgets(parse(STATED))
    assert not set(BUDGETS) & set(search_space(STATED, has_quotas=True).values)
    kept = search_space(STATED, has_quotas=True, keep=[PLACES], budgets=budgets)
    assert PLACES not in kept.values


def test_a_device_has_the_budgets_and_the_workspace_that_it_had():
    sections = {"classes": {}, SECTION: {STEP_TOKENS: 256, PLACES: 128, PASS_TOKENS: 1_024}}
    machine, rest = with_budgets(MACHINE, sections)
    assert rest == {"classes": {}}
    assert (machine.step_tokens, machine.max_running, machine.embed_batch_tokens) == (256, 128, 1_024)
    assert machine.workspace_batches * 1_024 == MACHINE.workspace_batches * 4_096
    assert with_budgets(MACHINE, rest) == (MACHINE, rest)
    # No step of the log had as many tokens.
    assert with_budgets(MACHINE, {SECTION: {STEP_TOKENS: 2_048}})[0].step_tokens == MACHINE.step_tokens


@pytest.mark.long
def test_requests_of_a_replay_with_fewer_places_wait_longer():
    def latest(**more):
        found = replayed(block(), {**served(CONTENT), **more})
        assert found.refused is None
        return max(each.latency_ms for each in found.requests)

    assert latest(**{SECTION: {PLACES: 1}}) > latest() + 100
    assert latest(**{SECTION: {PLACES: 128}}) == latest()


@pytest.mark.long
def test_requests_of_a_replay_at_a_higher_load_arrive_sooner_and_wait_longer():
    """Ten times as many requests a second find one place taken."""

    def latencies(load):
        found = replayed(block(), {**served(CONTENT), SECTION: {PLACES: 1}, LOAD: load})
        return [each.latency_ms for each in found.requests]

    low, high = latencies(0.1), latencies(10.0)
    assert max(low) == pytest.approx(min(low), abs=11)
    assert max(high) > 10 * max(low)
