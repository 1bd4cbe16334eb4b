"""The bound in hindsight against exhaustive search, feasible schedules and the simulated engines."""

import asyncio
from dataclasses import replace
from functools import cache
from itertools import combinations
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark_control_plane.judge.hindsight.attainment_bound import bound_of_parts, served_parts
from benchmark_control_plane.judge.hindsight.feasible_schedule import feasible_attainment, served_in_time
from benchmark_control_plane.judge.hindsight.least_work import least_works
from benchmark_control_plane.judge.open_loop_client import open_loop
from benchmark_control_plane.judge.records import SloTargets
from benchmark_control_plane.judge.simulated_target import BLOCK_TOKENS, simulated_target
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from benchmark_control_plane.judge.workflow_stages import WorkflowStage
from benchmark_control_plane.judge.workload import PlannedRequest
from benchmark_control_plane.simulator import virtual_time
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind

DRAIN = 30.0
BLOCK_BYTES = BLOCK_TOKENS * 1_024


def device(**changes):
    return SimulatedDeviceSection(
        **{
            "step": (0.02, 1e-4, 1e-3, 1e-7),
            "embedding": (0.01, 1e-4),
            "kv_memory": 64 * BLOCK_BYTES,
            "kv_bytes_per_token": 1_024,
            "max_model_tokens": 512,
            "max_running": 4,
            "step_tokens": 256,
            "embed_batch_tokens": 512,
            **changes,
        }
    )


def generation(name, at, prompt, output, service_class="chat", **more):
    return PlannedRequest(
        name, at, Kind.GENERATE, service_class, prompt_tokens=prompt, output_tokens=output, **more
    )


def embedding(name, at, lengths, **more):
    return PlannedRequest(
        name, at, Kind.EMBED, "documents", prompt_tokens=sum(lengths), lengths=tuple(lengths), **more
    )


def bound(requests, machine, objectives):
    works = least_works(requests, machine, objectives, DRAIN)
    return bound_of_parts(served_parts(works, machine))


# --- exact figures --------------------------------------------------------------------------------------


def test_requests_with_room_and_time_are_all_served():
    requests = [generation(f"g{n}", n * 1.0, 50, 10) for n in range(5)] + [embedding("e", 0.5, [100, 50])]
    targets = {"chat": SloTargets(ttft_ms=200, tpot_ms=50), "documents": SloTargets(e2e_ms=200)}
    assert bound(requests, device(), targets) == 1.0
    works = least_works(requests, device(), targets, DRAIN)
    assert feasible_attainment(works, device(), served_parts(works, device())) == 1.0


def test_objectives_below_the_unloaded_latency_are_not_met():
    alone = 0.02 + 1e-4 * 50
    requests = [generation("g", 0.0, 50, 10)]
    assert bound(requests, device(), {"chat": SloTargets(ttft_ms=1e3 * alone * 1.01)}) == 1.0
    assert bound(requests, device(), {"chat": SloTargets(ttft_ms=1e3 * alone * 0.99)}) < 0.01
    assert bound(requests, device(), {"chat": SloTargets(tpot_ms=20.5)}) < 0.01


def test_time_limits_the_embeddings_that_are_served():
    # Each takes 0.0605 s of a device that is asked for ten of them within 0.3 s.
    requests = [embedding(f"e{n}", 0.0, [505]) for n in range(10)]
    share = bound(requests, device(), {"documents": SloTargets(e2e_ms=300)})
    assert 0.4 <= share <= 0.5


def test_memory_limits_the_generations_that_are_served():
    # Eight blocks hold one of these at a time, for 40 steps of at least 20 ms, within two seconds.
    requests = [generation(f"g{n}", 0.0, 80, 41) for n in range(10)]
    small = device(kv_memory=32 * BLOCK_BYTES // 4, max_model_tokens=128)
    share = bound(requests, small, {"chat": SloTargets(e2e_ms=2_000)})
    assert 0.2 <= share <= 0.35
    assert bound(requests, device(), {"chat": SloTargets(e2e_ms=20_000)}) == 1.0


def test_a_shared_pool_divides_memory_between_blocks_and_passes():
    # 256 tokens of a pass take the pool for themselves, and so does the generation.
    pool = device(
        pool=16 * BLOCK_BYTES, kv_memory=None, max_model_tokens=256, embed_batch_tokens=256,
        embed_bytes_per_token=1_024, embed_input_tokens=256,
    )  # fmt: skip
    requests = [generation("g", 0.0, 200, 50)] + [embedding(f"e{n}", 0.0, [256]) for n in range(20)]
    targets = {"chat": SloTargets(e2e_ms=1_300), "documents": SloTargets(e2e_ms=1_300)}
    together = bound(requests, pool, targets)
    assert together <= bound(requests, device(), targets)


def test_later_stages_of_a_workflow_need_the_earlier_ones():
    stage = [WorkflowStage("w", name, 400.0) for name in ("query", "answer")]
    requests = [
        embedding("query", 0.0, [10], stage=stage[0]),
        generation("answer", 0.0, 50, 10, after="query", stage=stage[1]),
    ]
    assert bound(requests, device(), {}) == 1.0
    late = [embedding("query", 0.0, [512] * 8, stage=stage[0]), requests[1]]
    assert bound(late, device(), {}) < 0.01


def test_warm_up_and_nothing_to_do():
    assert least_works([generation("g", -1.0, 50, 10)], device(), {}, DRAIN) == []
    assert bound([], device(), {}) == 1.0


# --- against other schedules ----------------------------------------------------------------------------

chats = st.builds(generation, st.just(""), st.floats(0, 0.3), st.integers(1, 120), st.integers(1, 40))
texts = st.builds(
    embedding, st.just(""), st.floats(0, 0.3), st.lists(st.integers(1, 250), min_size=1, max_size=4)
)
workloads = st.lists(st.one_of(chats, texts), min_size=1, max_size=6)
milliseconds = st.one_of(st.none(), st.floats(20, 900))
targets = st.fixed_dictionaries(
    {
        "chat": st.builds(
            SloTargets, ttft_ms=milliseconds, tpot_ms=st.one_of(st.none(), st.floats(20, 60)),
            e2e_ms=milliseconds, gap_ms=st.one_of(st.none(), st.floats(25, 200)),
        ),
        "documents": st.builds(SloTargets, e2e_ms=milliseconds),
    }
)  # fmt: skip
machines = st.builds(
    device,
    kv_memory=st.sampled_from([12 * BLOCK_BYTES, 20 * BLOCK_BYTES, 64 * BLOCK_BYTES]),
    max_model_tokens=st.just(160),
    max_running=st.sampled_from([1, 2, 8]),
    step_tokens=st.sampled_from([64, 256]),
    prefix_cache=st.booleans(),
)


def numbered(requests):
    return sorted((replace(r, id=f"r{n}") for n, r in enumerate(requests)), key=lambda r: (r.at, r.id))


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(workloads, targets, machines)
def test_no_choice_of_requests_is_served_beyond_the_bound(requests, objectives, machine):
    requests = numbered(requests)
    works = least_works(requests, machine, objectives, DRAIN)
    parts = served_parts(works, machine)
    most = bound_of_parts(parts) * len(requests) + 1e-6
    assert feasible_attainment(works, machine, parts) * len(requests) <= most
    for count in range(1, len(requests) + 1):
        for chosen in combinations([r.id for r in requests], count):
            assert len(served_in_time(works, machine, chosen, attrgetter("due"), 0.0)) <= most


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(workloads, targets, machines, st.booleans())
def test_no_simulated_system_exceeds_the_bound(requests, objectives, machine, has_gate):
    requests = numbered(requests)
    sections = {
        "classes": {
            "chat": {"default": True, **objectives["chat"].objectives()},
            "documents": objectives["documents"].objectives(),
        }
    }

    async def run():
        async with simulated_target(machine, sections, has_gate=has_gate) as target:
            clock = asyncio.get_running_loop().time
            return await open_loop(target, requests, objectives, warmup=0.0, drain=DRAIN, clock=clock)

    records = virtual_time.run(run()).records
    met = sum(record.outcome is Outcome.MET for record in records)
    assert met <= bound(requests, machine, objectives) * len(requests) + 1e-6


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 3)), min_size=1, max_size=3
    ),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(2, 4),
    st.integers(1, 2),
)  # fmt: skip
def test_no_schedule_at_all_exceeds_the_bound(shapes, ttft, tpot, e2e, blocks, most_running):
    """Every step takes one second, so the search may enumerate which requests each step computes."""
    machine = device(
        step=(1.0, 0.0, 0.0, 0.0),
        kv_memory=blocks * BLOCK_BYTES,
        max_model_tokens=32,
        max_running=most_running,
    )
    requests = numbered(generation("", float(at), prompt, output) for at, prompt, output in shapes)
    objectives = {"chat": SloTargets(ttft_ms=1e3 * ttft, tpot_ms=1e3 * tpot, e2e_ms=1e3 * e2e)}
    best = most_served(requests, ttft, tpot, e2e, blocks, most_running)
    assert best <= bound(requests, machine, objectives) * len(requests) + 1e-6


def most_served(requests, ttft, tpot, e2e, blocks, most_running):
    """Largest number of requests met by any sequence of steps; a paused request holds nothing."""
    horizon = max(int(r.at) for r in requests) + e2e

    @cache
    def search(now, produced, firsts, lasts):
        met = sum(
            count == r.output_tokens
            and first - r.at <= ttft
            and last - r.at <= e2e
            and last - first <= tpot * (r.output_tokens - 1)
            for r, count, first, last in zip(requests, produced, firsts, lasts, strict=True)
        )
        if now >= horizon or met == len(requests):
            return met
        ready = [n for n, r in enumerate(requests) if r.at <= now and produced[n] < r.output_tokens]
        best = met
        for count in range(min(len(ready), most_running) + 1):
            for batch in combinations(ready, count):
                held = sum(-(-(requests[n].prompt_tokens + produced[n]) // BLOCK_TOKENS) for n in batch)
                if held <= blocks:
                    after = list(produced), list(firsts), list(lasts)
                    for n in batch:
                        after[1][n] = now + 1 if not produced[n] else firsts[n]
                        after[0][n] += 1
                        after[2][n] = now + 1
                    best = max(best, search(now + 1, *map(tuple, after)))
        return best

    empty = (0,) * len(requests)
    return search(0, empty, empty, empty)
