"""The simulated engine's prefix cache: blocks are shared, found again, evicted in order and conserved."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cost_models.step_time import StepLoad, affine, llm_only
from backends.simulated.continuous_batching import RankedScheduler, SimulatedScheduler, SimulatedSequence
from backends.simulated.generator import SimulatedGenerator
from backends.simulated.policy_scheduler import PolicyScheduler, PolicySequence
from backends.simulated.shared_device import SimulatedDevice
from backends.vllm.plugin.request_metadata import Defaults, make_engine_request
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import SimulatedRequest, arrival_times, simulate
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.clock import Instant
from controlplane.core.generation import Sampling
from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.engine.options import EngineOptions

BLOCK = 4
SIZES = {"block_tokens": BLOCK, "max_running": 8, "step_tokens": 24}
SLO_CLASS = {"chat": {"ttft_ms": 1_000, "tpot_ms": 60, "default": True}}
PREFIX, OWN, OUTPUT, COUNT = 2_000, 40, 32, 40
SHARED_BLOCKS, OWN_BLOCKS = PREFIX // 16, 5


def sequence(prompt, output: int = 1) -> SimulatedSequence:
    found = SimulatedSequence(len(prompt), output)
    found.know_tokens(prompt, BLOCK)
    return found


def scheduler(blocks: int) -> SimulatedScheduler[SimulatedSequence]:
    return SimulatedScheduler(blocks=blocks, reserves_prompts=True, **SIZES)


def step(engine) -> int:
    """Runs a step and returns its prompt tokens."""
    load = StepLoad()
    engine.plan(load)
    engine.complete()
    return load.prefill_tokens


def test_a_prefix_is_computed_and_held_once_and_the_last_token_is_always_computed():
    engine = scheduler(blocks=9)
    first, same, other = (sequence(range(16), 9), sequence(range(16), 9), sequence([*range(12), 90, 91], 9))
    for one in (first, same, other):
        engine.add(one)
    # The whole prompt of `same` is in the cache but for its last block.
    assert step(engine) == 16 + 4 + 2
    assert [one.found for one in (first, same, other)] == [0, 12, 12]
    assert engine.used_blocks == 4 + 1 + 1
    engine.remove(first)
    assert engine.used_blocks == 5


def test_a_cached_block_that_nobody_uses_is_taken_from_the_free_ones():
    engine = scheduler(blocks=6)
    engine.add(sequence(range(16)))
    step(engine)
    assert engine.used_blocks == 0
    holder = sequence(range(100, 108), 9)
    engine.add(holder)
    step(engine)
    # Three of five blocks are cached, but four are free.
    engine.add(sequence([*range(12), *range(200, 208)]))
    assert step(engine) == 0 and len(engine.waiting) == 1
    engine.remove(holder)
    assert step(engine) == 8


def test_the_end_of_the_prefix_used_longest_ago_is_evicted_first():
    engine = scheduler(blocks=8)
    for start in (0, 100):
        engine.add(sequence(range(start, start + 16)))
        step(engine)
    engine.add(sequence(range(200, 208)))
    step(engine)
    old, new = sequence(range(16)), sequence(range(100, 116))
    engine.add(new)
    engine.add(old)
    step(engine)
    # Three blocks were taken since, the last one by `new`: all from the end of the older prefix.
    assert (old.found, new.found) == (4, 12)


def test_a_preempted_sequence_finds_its_prompt_and_output_again():
    engine = scheduler(blocks=9)
    one = sequence(range(10), 20)
    engine.add(one)
    for _ in range(8):
        step(engine)
    engine.preempt(one)
    assert (one.total, engine.recompute_tokens) == (18, 17)
    step(engine)
    assert one.computed == 18 and one.found == 0


def policy_sequence(number: int, prompt, output: int) -> PolicySequence:
    found = PolicySequence(len(prompt), output)
    found.know_tokens(prompt, BLOCK)
    found.state = make_engine_request(
        {}, Defaults(), request_id=f"r{number}", prompt_tokens=len(prompt), max_tokens=output, now=Instant(0)
    )
    return found


def assert_conserved(engine, withheld: int) -> None:
    held = Counter(block for one in engine.running for block in one.full)
    assert all(block.ref_cnt == count for block, count in held.items())
    assert all(block.ref_cnt == 0 for block in engine._cache._free)
    cached = {*engine._cache._by_hash.values()}.union(*engine._cache._later.values())
    assert held.keys() | engine._cache._free.keys() == cached
    distinct = len(held) + sum(one.blocks - len(one.full) for one in engine.running)
    assert engine.free_blocks + distinct + withheld == engine.total_blocks
    assert engine.free_blocks >= len(engine._cache)
    assert engine.used_blocks == distinct


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), st.integers(0, 40), st.integers(1, 12)),
        st.tuples(st.just("step")),
        st.tuples(st.just("preempt"), st.integers(0, 7)),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("quota"), st.integers(18, 24)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("kind", [SimulatedScheduler, RankedScheduler, PolicyScheduler])
@given(actions=ACTIONS)
def test_blocks_are_conserved(kind, actions):
    policy = (
        PolicyScheduler(EngineOptions(ordering="srmt"), blocks=24, **SIZES)
        if kind is PolicyScheduler
        else None
    )
    engine = policy or kind(blocks=24, reserves_prompts=True, **SIZES)
    alive = []

    def advance() -> None:
        if policy is not None:
            policy.arrange(Instant(0))
        engine.plan(StepLoad())
        assert_conserved(engine, policy._withheld if policy else 0)
        if policy is not None:
            rows = [one.blocks - one.state.shared + one.state.carried for one in engine.running]
            assert sum(rows) == engine.used_blocks
            held = policy._batch_view.held.tolist()
            assert held == [
                one.blocks - sum(block.ref_cnt > 1 for block in one.full) for one in engine.running
            ]
        ended = {one for one in engine.complete() if one.is_removed}
        alive[:] = [one for one in alive if one not in ended]

    for number, (action, *values) in enumerate(actions):
        if action == "add":
            group, shared, output = values
            alive.append(
                policy_sequence(number, [*range(group * 100, group * 100 + shared), -number], output)
            )
            engine.add(alive[-1])
        elif action == "preempt" and engine.running:
            engine.preempt(engine.running[values[0] % len(engine.running)])
        elif action == "remove" and alive:
            engine.remove(alive.pop(values[0] % len(alive)))
        elif action == "quota" and policy is not None:
            policy.set_quota(values[0], values[0])
        elif action == "step":
            advance()
        assert_conserved(engine, policy._withheld if policy else 0)
    if policy is not None:
        policy.set_quota(24, 24)
    for _ in range(2_000):
        if not alive:
            break
        advance()
    assert not alive
    assert engine.used_blocks == 0


def test_the_first_delta_states_the_cached_tokens_and_leases_add_up_to_the_use():
    geometry = KvGeometry(elements_per_token=1, bytes_per_element=1, block_tokens=BLOCK)
    service_class = ServiceClass("any", Slo(), 0, sheddable=False)

    async def scenario():
        device = SimulatedDevice(llm_only(affine(1.0, 0, 0, 0)))
        generator = SimulatedGenerator(
            device, geometry=geometry, lengths=lambda _: 6, kv_bytes=24 * geometry.bytes_per_block,
            max_model_tokens=64, scheduling=EngineOptions(), has_prefix_cache=True,
        )  # fmt: skip
        await generator.start()

        async def cached(name: str) -> list[int]:
            request = Request(name, Kind.GENERATE, "m", "t", service_class, Slo(), Instant(0), 10, 6)
            deltas = generator.generate(request, range(10), Sampling(max_tokens=6))
            return [delta.cached_tokens async for delta in deltas]

        asked = [asyncio.create_task(cached(name)) for name in "abc"]
        await asyncio.sleep(1.5)
        state = generator.state()
        found = await asyncio.gather(*asked)
        await generator.stop()
        await generator.start()
        after_restart = await cached("d")
        await generator.stop()
        return state, found, after_restart[0]

    state, found, after_restart = run(scenario())
    assert [one[0] for one in found] == [0, 8, 8]
    # Ten prompt tokens and the first output: two shared blocks and one of its own each.
    assert state.used_bytes == sum(state.held_bytes.values()) == 5 * geometry.bytes_per_block
    assert sorted(held // geometry.bytes_per_block for held in state.held_bytes.values()) == [1, 1, 3]
    assert after_restart == 0


def attainment(*, blocks: int, has_prefix_cache: bool, rate: float) -> tuple[float, int]:
    """Share of the requests that met their objectives, and the number rejected."""
    machine = Machine(llm_only(affine(0.0067, 2e-5, 7.6e-5, 1e-8)), has_prefix_cache=has_prefix_cache)
    machine = replace(machine, kv_bytes=blocks * machine.geometry.bytes_per_block)
    offered = [
        SimulatedRequest(at, PREFIX + OWN, OUTPUT, prefix_tokens=PREFIX)
        for at in arrival_times(np.random.default_rng(0), rate, COUNT)
    ]
    outcomes = [record.outcome for record in simulate(offered, machine, {"classes": SLO_CLASS}).records]
    return outcomes.count("met") / COUNT, sum(outcome.startswith("rejected") for outcome in outcomes)


@pytest.mark.parametrize("rate", [10.0, 1_000.0])
def test_requests_with_a_common_prefix_are_served_as_well_as_in_a_larger_cache_without_sharing(rate):
    blocks = SHARED_BLOCKS + COUNT * OWN_BLOCKS
    shared, rejected = attainment(blocks=blocks, has_prefix_cache=True, rate=rate)
    larger = blocks + (COUNT - 1) * SHARED_BLOCKS
    alone, _ = attainment(blocks=larger, has_prefix_cache=False, rate=rate)
    assert rejected == 0
    assert shared >= alone
    # The same cache without sharing holds two of them.
    assert shared > attainment(blocks=max(blocks, 256), has_prefix_cache=False, rate=rate)[0]
