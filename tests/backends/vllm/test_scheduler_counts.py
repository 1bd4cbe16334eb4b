"""Tandem's scheduler on vLLM's real scheduler and KV manager, without a model: no leaks, no starvation."""

import time
from queue import Queue
from random import Random

import pytest

from backends.cost_models.step_time import OPT_13B_A100_80G, StepLoad
from backends.vllm.plugin.batch_view import is_ending
from backends.vllm.plugin.request_metadata import metadata_of
from backends.vllm.plugin.shared_state import SharedState
from benchmark_control_plane.experiments.engine.starvation import (
    AGED_SHARE,
    HEAD_START_S,
    aged,
    overtaken,
    step,
)
from controlplane.core.clock import Duration, Instant, seconds
from controlplane.core.generation import Handoff
from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.memory_ledger import generate_footprint
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.engine.interface import StepPlan
from controlplane.policy.registry import ENGINE_POLICIES
from controlplane.service.gate.fair_queueing import FairQueue
from controlplane.service.gate.snapshot import service_time
from predictors.timing.online_step_time import StepWork

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

BLOCKS = 64
BLOCK_TOKENS = 16
MOST_RUNNING = 16
EVERY_ORDERING = sorted(ENGINE_POLICIES)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request):
    from backends.vllm.simulation.stepped_engine import SteppedEngine, SteppedEngineSetup

    return SteppedEngine(
        SteppedEngineSetup(
            blocks=BLOCKS,
            block_tokens=BLOCK_TOKENS,
            max_model_tokens=512,
            max_running=MOST_RUNNING,
            max_step_tokens=256,
            batch_time="opt-13b-a100-80g",
            is_async=request.param,
        )
    )


def conserved(scheduler) -> bool:
    """Whether free, withheld and held blocks add up to the pool; held blocks belong to requests."""
    pool = scheduler.kv_cache_manager.block_pool
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    held = {b.block_id for m in managers for blocks in m.req_to_blocks.values() for b in blocks}
    return pool.get_num_free_blocks() + len(scheduler.balloon) + len(held) == BLOCKS


def view_matches_vllm(scheduler) -> bool:
    """Whether the policy's view and the incremental columns agree with vLLM's own objects."""
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    given = {one.request_id: len(manager.req_to_blocks[one.request_id]) for one in scheduler.running}
    view = scheduler.view(Instant(scheduler.clock()))
    running = scheduler.running
    tokens = [(one.num_computed_tokens, one.num_tokens + one.num_output_placeholders) for one in running]
    asked = [-(-min(known, done + 256) // BLOCK_TOKENS) + (-done // BLOCK_TOKENS) for done, known in tokens]
    keys, blocks = (column.tolist() for column in scheduler._tracker.rows(running))
    assert view.growth == sum(max(0, more) for more in asked)
    assert list(view.running) == [one.tandem for one in running]
    assert keys == [one.tandem.key for one in running]
    assert [one.tandem.tokens for one in running] == [one.num_tokens for one in running]
    assert blocks == [-(-done // BLOCK_TOKENS) for done, _ in tokens]
    return {one.request.id: one.held for one in view.running} == given


def random_metadata(random: Random, output: int) -> dict[str, object]:
    """Metadata that a client may send, including wrong forecasts and none at all."""
    everything = {
        "priority": random.randrange(3),
        "ttft_ms": random.choice([50, 500, 5_000]),
        "gap_ms": random.choice([100, 1_000]),
        "tokens": max(1, round(output * random.choice([0.25, 1, 4]))),
    }
    return {key: value for key, value in everything.items() if random.random() < 0.8}


@pytest.mark.parametrize("ordering", EVERY_ORDERING)
def test_no_block_leaks_over_hundreds_of_requests_with_aborts_and_quota_changes(engine, ordering):
    random = Random(ordering)
    scheduler = engine.restart(tandem={"ordering": ordering, "starvation_ms": 2_000})
    wanted: dict[str, int] = {}
    got: dict[str, int] = {}
    gone: set[str] = set()
    steps_since = 0
    for number in range(400):
        request_id, output = f"r{number}", random.randint(1, 60)
        wanted[request_id] = output
        engine.add(
            request_id, random.randint(1, 200), output, extra={"tandem": random_metadata(random, output)}
        )
        for _ in range(random.randrange(4)):
            for one, tokens in step(engine).items():
                got[one] = got.get(one, 0) + tokens
            assert conserved(scheduler)
            assert view_matches_vllm(scheduler)
            steps_since += 1
            assert steps_since < 2 or scheduler.balloon.used <= scheduler.use_ceiling
        if random.random() < 0.05:
            quota = random.randint(20, BLOCKS)
            scheduler.set_quota(quota, random.randint(quota, BLOCKS))
            steps_since = 0
        if random.random() < 0.1 and (alive := sorted(scheduler.requests)):
            gone.add(aborted := random.choice(alive))
            engine.abort([aborted])
            assert conserved(scheduler)
    scheduler.set_quota(BLOCKS)
    for _ in range(60_000):
        if not scheduler.requests:
            break
        for one, tokens in step(engine).items():
            got[one] = got.get(one, 0) + tokens
    assert not scheduler.requests
    assert conserved(scheduler)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS
    assert scheduler.preemptions.count > 0
    assert {one: tokens for one, tokens in got.items() if one not in gone} == {
        one: tokens for one, tokens in wanted.items() if one not in gone
    }
    assert scheduler.engine_policy.waiting() == 0


@pytest.mark.parametrize("ordering", EVERY_ORDERING)
def test_a_quota_is_enforced_within_two_steps(engine, ordering):
    scheduler = engine.restart(tandem={"ordering": ordering})
    for number in range(12):
        engine.add(f"r{number}", 60, 100, extra={"tandem": {"tokens": 100}})
    for _ in range(30):
        step(engine)
    assert scheduler.balloon.used > 24
    scheduler.set_quota(24)
    step(engine)
    step(engine)
    for _ in range(200):
        assert scheduler.balloon.used <= 24
        step(engine)
    assert scheduler.facts(engine.now_ns).ceded == BLOCKS - 24


@pytest.mark.parametrize("ordering", EVERY_ORDERING)
def test_running_requests_keep_their_blocks_under_the_use_ceiling_while_a_lower_quota_starts_none(
    engine, ordering
):
    scheduler = engine.restart(tandem={"ordering": ordering})
    for number in range(40):
        # The first nine fit until they end; without that, growth preempts some of them.
        if number == 9:
            while scheduler.balloon.used <= 40:
                step(engine)
            scheduler.set_quota(24, BLOCKS)
        engine.add(f"r{number}", 60, 40, extra={"tandem": {"tokens": 40}})
    preempted, before = scheduler.preemptions.count, {one.request_id for one in scheduler.running}
    while scheduler.balloon.used > 24:
        step(engine)
        started = {one.request_id for one in scheduler.running} - before
        assert not started or scheduler.balloon.used <= 24
    assert scheduler.preemptions.count == preempted
    scheduler.set_quota(24)
    for _ in range(100):
        step(engine)
        assert scheduler.balloon.used <= 24


class OfferAll:
    """An engine policy that offers every waiting request and preempts none."""

    def __init__(self):
        self.states = []

    def enqueue(self, state):
        self.states.append(state)

    def dequeue(self, state):
        self.states.remove(state)

    def waiting(self):
        return len(self.states)

    def plan(self, view):
        return StepPlan(offer=list(self.states))


def test_a_policy_cannot_start_requests_beyond_the_quota(engine):
    scheduler = engine.restart(tandem={})
    scheduler.engine_policy = OfferAll()
    scheduler.set_quota(10, BLOCKS)
    for number in range(12):
        engine.add(f"r{number}", 60, 3, extra={"tandem": {"tokens": 3}})
    step(engine)
    assert [one.request_id for one in scheduler.running] == ["r0", "r1"]
    assert scheduler.balloon.used == 8
    for _ in range(100):
        step(engine)
        assert scheduler.balloon.used <= 10
    assert not scheduler.requests


@pytest.mark.parametrize("ordering", EVERY_ORDERING)
def test_a_request_larger_than_the_quota_does_not_block_others(engine, ordering):
    scheduler = engine.restart(tandem={"ordering": ordering})
    scheduler.set_quota(8)
    engine.add("large", 150, 20, extra={"tandem": {"priority": 2, "ttft_ms": 100}})
    finished = set()
    for number in range(6):
        engine.add(f"small{number}", 40, 20, extra={"tandem": {"tokens": 20}})
    for _ in range(2_000):
        finished |= {one for one, _, is_finished in engine.step() if is_finished}
        engine.jump(engine.now_ns + 1_000_000)
    assert finished == {f"small{number}" for number in range(6)}
    scheduler.set_quota(BLOCKS)
    for _ in range(200):
        finished |= {one for one, _, is_finished in engine.step() if is_finished}
    assert "large" in finished


def test_prefill_time_is_learned_from_observed_steps(engine):
    """Also when a step is still in flight while the next one is planned."""
    random = Random(1)
    scheduler = engine.restart(tandem={"ordering": "fcfs"})
    for number in range(60):
        engine.add(f"r{number}", random.randint(50, 200), random.randint(10, 30), extra={})
        for _ in range(random.randrange(12)):
            step(engine)
    predict = scheduler.pace_estimator.steps.predict
    decode_only, with_prefill = StepLoad(decodes=8, cells=8 * 150), StepLoad(100, 100 * 100, 8, 8 * 150)
    assert predict(StepWork(0, 8, 8 * 150)) == pytest.approx(OPT_13B_A100_80G(decode_only), rel=0.02)
    assert predict(StepWork(100, 8, 8 * 150)) == pytest.approx(OPT_13B_A100_80G(with_prefill), rel=0.05)


def test_invalid_quotas_and_options_are_refused(engine):
    scheduler = engine.restart(tandem={})
    with pytest.raises(ValueError, match="quota=0"):
        scheduler.set_quota(0)
    with pytest.raises(ValueError, match="quota=65"):
        scheduler.set_quota(BLOCKS + 1)
    with pytest.raises(ValueError, match="quota=9 blocks with use_ceiling=8"):
        scheduler.set_quota(9, 8)
    with pytest.raises(ValueError, match="'speed': unknown; known are ordering"):
        scheduler.set_options({"speed": 9})
    with pytest.raises(ValueError, match=r"ordering='fifo'.*choose one of apt, edf, fcfs"):
        scheduler.set_options({"ordering": "fifo"})
    assert scheduler.options.ordering == "srmt"


def test_the_policy_can_change_while_requests_wait(engine):
    scheduler = engine.restart(tandem={"ordering": "fcfs"})
    for number in range(40):
        engine.add(f"r{number}", 60, 30, extra={"tandem": {"tokens": 30}})
    for _ in range(5):
        step(engine)
    for ordering in EVERY_ORDERING:
        waiting = len(scheduler.waiting)
        scheduler.set_options({"ordering": ordering})
        assert scheduler.engine_policy.waiting() == waiting > 0
        step(engine)
    finished = set()
    for _ in range(2_000):
        finished |= {one for one, _, is_finished in engine.step() if is_finished}
    assert len(finished) == 40


def test_a_request_with_invalid_metadata_gets_the_default_class(engine):
    scheduler = engine.restart(tandem={"default": {"class": "chat", "ttft_ms": 700}})
    engine.add("odd", 20, 5, extra={"tandem": {"ttft": 100}})
    engine.add("silent", 20, 5, extra={})
    engine.add("flat", 20, 5, extra={"tandem_ttft_ms": 100, "tandem_class": "fast"})
    assert scheduler.malformed == 1
    progress = {name: request.tandem for name, request in scheduler.requests.items()}
    classes = {name: one.request.service_class.name for name, one in progress.items()}
    assert classes == {"odd": "chat", "silent": "chat", "flat": "fast"}
    assert progress["flat"].request.slo.ttft == 100_000_000


@pytest.mark.parametrize("ordering", ["fcfs", "edf"])
def test_a_low_class_waits_for_a_higher_one_no_longer_than_the_head_start(engine, ordering):
    started = [wait for wait in overtaken(engine, ordering, 1_200) if wait.waited is not None]
    assert len(started) >= 3
    assert 0.5 * HEAD_START_S < max(wait.waited for wait in started) <= HEAD_START_S


@pytest.mark.parametrize("ordering", ["fcfs", "edf"])
def test_started_low_class_requests_finish_under_an_overload_of_a_higher_class(engine, ordering):
    lows = sum(1 for _ in overtaken(engine, ordering, 1_200))
    requests = engine.core.scheduler.requests
    progress = [request.tandem for name, request in requests.items() if name.startswith("low")]
    assert lows - len(progress) >= 3
    # Without load it takes about 3 s.
    long_ago = Instant(engine.now_ns - seconds(10))
    late = [one for one in progress if one.first_token is not None and one.first_token < long_ago]
    assert not [one.request.id for one in late]


def test_requests_that_missed_their_slo_start_within_the_bound_under_endless_small_requests(engine):
    waits = list(aged(engine, AGED_SHARE, 1_800))
    assert len(waits) >= 5
    assert all(wait.waited is not None and wait.waited <= wait.bound for wait in waits)


def test_without_an_aged_share_such_requests_never_start(engine):
    waits = list(aged(engine, 0.0, 1_200))
    assert waits
    assert all(wait.waited is None for wait in waits)


def test_a_request_that_ends_the_delay_starts_in_that_step(engine, tmp_path):
    scheduler = engine.restart(tandem={})
    engine.add("first", 20, 60, extra={"tandem": {"ttft_ms": 60_000, "tpot_ms": 60_000}})
    for _ in range(3):
        step(engine)
    scheduler._shared_state = SharedState.create(tmp_path / "state")
    scheduler._shared_state.is_device_shared = True
    arriving = Queue()
    arriving.put("second")
    scheduler.input_queue = arriving
    scheduler.process_inputs = lambda: engine.add(arriving.get_nowait(), 20, 60, extra={})
    step(engine)
    assert {request.request_id for request in scheduler.running} == {"first", "second"}


def test_the_last_token_does_not_wait_for_a_delayed_step(engine, tmp_path):
    scheduler = engine.restart(tandem={})
    scheduler.clock = time.monotonic_ns
    scheduler._shared_state = SharedState.create(tmp_path / "state")
    scheduler._shared_state.is_device_shared = True
    engine.add("one", 20, 5, extra={"tandem": {"ttft_ms": 60_000, "tpot_ms": 60_000}})
    has_ended = False
    while scheduler.has_requests():
        ends, before = bool(scheduler.running) and is_ending(scheduler.running[0]), scheduler.waited_ns
        engine.step()
        has_ended |= ends
        assert not ends or scheduler.waited_ns == before
    assert scheduler.waited_ns > 0
    assert has_ended == engine.setup.is_async


# The first workload runs out of blocks, the second out of batch slots.
@pytest.mark.parametrize(("prompt", "output", "every"), [(60, 40, 3), (10, 20, 1)])
@pytest.mark.parametrize("ordering", ["edf", "srmt"])
def test_backlogged_tenants_share_the_engine_by_weight(engine, ordering, prompt, output, every):
    """Work is estimated by the gate; a third tenant is idle."""
    scheduler = engine.restart(tandem={"ordering": ordering})
    fair_queue = FairQueue({"heavy": 3.0, "light": 1.0, "idle": 1.0})
    service_class = ServiceClass("any", Slo(ttft=seconds(1)), 0, sheddable=False)
    footprint = generate_footprint(
        KvGeometry(1, 1, BLOCK_TOKENS),
        prompt_tokens=prompt,
        max_output_tokens=output,
        expected_tokens=output,
    )
    served = {"heavy": 0, "light": 0}
    for number in range(900):
        for tenant in served if number % every == 0 else ():
            now, pace = Instant(engine.now_ns), scheduler.pace_estimator.pace
            name = f"{tenant}{number}"
            request = Request(
                name, Kind.GENERATE, "m", tenant, service_class, service_class.slo, now, prompt, output
            )
            work = Duration(0)
            if pace is not None:
                work = service_time(request, footprint, pace, BLOCKS * BLOCK_TOKENS, MOST_RUNNING)
            handoff = Handoff(fair_queueing_delay=fair_queue.shift(tenant, work, now))
            engine.add(name, prompt, output, extra={"tandem": metadata_of(request, handoff)})
        for one, tokens in step(engine).items():
            served[one.rstrip("0123456789")] += tokens if number >= 300 else 0
    assert len(scheduler.waiting) > 100
    assert served["heavy"] / served["light"] == pytest.approx(3.0, rel=0.15)
