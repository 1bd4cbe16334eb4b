"""The event model against a simulation of every single step, and under faults and overload."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark_control_plane.simulator.cluster import compiled_routing as compiled
from benchmark_control_plane.simulator.cluster.event_model import simulate_fleet
from benchmark_control_plane.simulator.cluster.scenario import (
    BoxModel,
    FleetOutcome,
    FleetScenario,
    FleetWorkload,
    RoutingPolicy,
)

pytestmark = pytest.mark.long

BOX = BoxModel(step=0.01, per_prompt_token=1e-4, per_sequence=1e-3, per_cell=1e-6, step_tokens=256)
OPEN = FleetScenario(1, BOX, has_admission=False, ttft=1e6, tpot=1e6)


def of(*rows: tuple[float, int, int]) -> FleetWorkload:
    """A workload of (arrival, prompt tokens, output tokens)."""
    at, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    none = np.zeros(len(rows), np.int32)
    return FleetWorkload(at.astype(np.float64), prompt, output, none - 1, none, none)


def every_step(box: BoxModel, load: FleetWorkload) -> list[float]:
    """TTFT of each request by the engine's rule, one step after another."""
    now, ttft, number = 0.0, [0.0] * len(load), 0
    queue: list[list[int]] = []
    running: dict[int, int] = {}
    cells = 0
    while number < len(load) or queue or running:
        if not queue and not running:
            now = max(now, float(load.at[number]))
        while number < len(load) and load.at[number] <= now:
            queue.append([number, int(load.prompt_tokens[number])])
            number += 1
        budget, read, done = box.step_tokens - len(running), 0, []
        for entry in queue:
            taken = min(entry[1], budget)
            entry[1] -= taken
            budget -= taken
            read += taken
            if entry[1] == 0:
                done.append(entry[0])
            if budget == 0:
                break
        now += box.step + box.per_prompt_token * read + box.per_sequence * len(running) + box.per_cell * cells
        cells += len(running)
        for request in list(running):
            running[request] -= 1
            if running[request] == 0:
                del running[request]
                cells -= int(load.prompt_tokens[request] + load.output_tokens[request]) - 1
        queue = [entry for entry in queue if entry[0] not in done]
        for request in done:
            ttft[request] = now - float(load.at[request])
            cells += int(load.prompt_tokens[request])
            running[request] = int(load.output_tokens[request]) - 1
            if running[request] == 0:
                del running[request]
                cells -= int(load.prompt_tokens[request])
    return ttft


# Off the grid of step times, where an arrival would fall on the end of a step.
row = st.tuples(
    st.floats(0, 3).map(lambda at: round(at, 3) + 1e-4 / 3), st.integers(1, 900), st.integers(1, 60)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(row, min_size=1, max_size=30, unique_by=lambda one: one[0]))
def test_first_tokens_come_when_a_simulation_of_every_step_says(rows: list[tuple[float, int, int]]) -> None:
    load = of(*sorted(rows))
    found = simulate_fleet(OPEN, load)
    assert found.ttft.tolist() == pytest.approx(every_step(BOX, load), rel=1e-3, abs=1e-4)
    assert set(found.outcome.tolist()) == {FleetOutcome.MET}


def test_times_of_one_request_are_those_of_its_steps() -> None:
    found = simulate_fleet(OPEN, of((1.0, 500, 3)))
    # Steps of 256 and 244 prompt tokens, then two decode steps over 500 and 501 cells.
    assert found.ttft[0] == pytest.approx(0.02 + 0.05)
    assert found.tpot[0] == pytest.approx(0.011 + 1e-6 * 500.5)


def test_a_faster_box_takes_less_time() -> None:
    slow, fast = (simulate_fleet(replace(OPEN, speeds=(speed,)), of((0.0, 500, 3))) for speed in (1.0, 2.0))
    assert slow.ttft[0] == pytest.approx(2 * fast.ttft[0])


def test_runs_are_equal_for_equal_seeds_only() -> None:
    load = FleetWorkload.drawn(200, 5, 1, groups=20, shared_tokens=256)
    scenario = FleetScenario(10, seed=3)
    hashes = [
        simulate_fleet(each, load).trace_hash for each in (scenario, scenario, replace(scenario, seed=4))
    ]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("policy", list(RoutingPolicy))
def test_every_request_ends_under_overload_with_memory_short(policy: RoutingPolicy) -> None:
    box = BoxModel(kv_tokens=20_000, max_running=16)
    load = FleetWorkload.drawn(200, 4, 2, groups=10, shared_tokens=128, burst=3.0)
    found = simulate_fleet(FleetScenario(4, box, policy=policy), load)
    assert not np.any(found.outcome == FleetOutcome.UNFINISHED)
    assert found.share(FleetOutcome.REJECTED) > 0.05
    served = (found.outcome == FleetOutcome.MET) | (found.outcome == FleetOutcome.LATE)
    assert np.array_equal(served, ~np.isnan(found.ttft))


def test_a_box_that_dies_loses_its_requests_and_is_avoided_until_it_starts() -> None:
    load = FleetWorkload.drawn(60, 20, 1)
    scenario = FleetScenario(4, down=((2, 5.0, 12.0),))
    found = simulate_fleet(scenario, load)
    assert 0.0 < found.share(FleetOutcome.LOST) < 0.03
    assert not np.any(found.outcome == FleetOutcome.UNFINISHED)
    while_down = (load.at > 5.0) & (load.at < 12.0)
    assert not np.any(found.box[while_down & (found.outcome == FleetOutcome.MET)] == 2)
    assert np.any(found.box[(load.at > 12.5) & (found.outcome == FleetOutcome.MET)] == 2)
    assert simulate_fleet(replace(scenario, down=()), load).share(FleetOutcome.LOST) == 0.0


def test_the_requests_of_a_lost_router_go_to_the_others() -> None:
    load = FleetWorkload.drawn(8 * 20, 20, 1)
    scenario = FleetScenario(8, routers=4, ttft=0.5)
    whole = simulate_fleet(scenario, load)
    found = simulate_fleet(replace(scenario, router_down=(1, 5.0, 15.0)), load)
    before = load.at < 5.0
    assert np.array_equal(found.of(before).box, whole.of(before).box)
    assert found.trace_hash != whole.trace_hash
    assert not np.any(found.outcome == FleetOutcome.UNFINISHED) and found.share(FleetOutcome.LOST) == 0.0
    assert found.attainment > whole.attainment - 0.02
    lost = compiled.numbers_of(replace(scenario, router_down=(1, 5.0, 15.0)))
    asked = [compiled.router_of(lost, 4, request, 6.0) for request in range(16)]
    assert asked == [0, 2, 2, 3, 0, 3, 2, 3, 0, 0, 2, 3, 0, 2, 2, 3]
    assert compiled.router_of(lost, 4, 1, 15.0) == 1


@pytest.mark.parametrize("choices", [2, 4, 8])
def test_more_choices_take_less_time_of_fresh_reports(choices: int) -> None:
    load = FleetWorkload.drawn(8 * 30, 10, 1)
    scenario = FleetScenario(8, routers=1, report_period=0.001, ttft=0.5, choices=choices)
    random = simulate_fleet(replace(scenario, policy=RoutingPolicy.RANDOM), load)
    assert simulate_fleet(scenario, load).ttft_quantile(0.9) < random.ttft_quantile(0.9)


def test_a_prefix_cache_shortens_prompts_where_the_prefix_was_read_before() -> None:
    rows = of((0.0, 1_000, 2), (5.0, 1_000, 2), (10.0, 1_000, 2))
    group, shared = np.array([0, 0, -1]), np.array([800, 800, 0])
    found = simulate_fleet(OPEN, replace(rows, group=group, shared=shared))
    assert found.ttft[0] == pytest.approx(found.ttft[2])
    assert found.ttft[1] == pytest.approx(0.01 + 200 * 1e-4)


def test_a_turn_finds_what_the_turn_before_left_on_its_box() -> None:
    rows = of((0.0, 500, 100), (5.0, 800, 10), (10.0, 1_500, 2))
    group, shared = np.zeros(3, np.int32), np.array([0, 600, 1_400])
    found = simulate_fleet(OPEN, replace(rows, group=group, shared=shared))
    # The last turn follows one that went elsewhere.
    assert found.cached.tolist() == [0, 600, 810]
    assert found.ttft[1] == pytest.approx(0.01 + 200 * 1e-4)


def test_the_turns_of_a_conversation_grow_by_messages_and_outputs() -> None:
    load = FleetWorkload.conversations(50, 20, 1, median_message=200, turns=6, pause=5)
    assert len(load) == 1_000
    assert np.all(np.diff(load.at) >= 0) and load.prompt_tokens.max() <= 8_000
    first = [at for at in range(len(load)) if load.shared[at] == 0]
    assert len(first) / len(load) == pytest.approx(1 / 6, abs=0.05)
    for group in range(load.group.max() + 1):
        turns = np.flatnonzero(load.group == group)
        left = (load.prompt_tokens + load.output_tokens)[turns[:-1]]
        assert np.array_equal(load.shared[turns[1:]], left)
        assert np.all(np.diff(load.at[turns]) > 0.05 * load.output_tokens[turns[:-1]])
    assert len(FleetWorkload.conversations(50, 20, 1, median_message=400, turns=10, pause=5)) == 1_000
    with pytest.raises(ValueError, match="turns=50: too many prompts above 8,000"):
        FleetWorkload.conversations(50, 20, 1, median_message=400, turns=50, pause=5)


def test_tandem_keeps_more_objectives_than_random_near_capacity() -> None:
    load = FleetWorkload.drawn(16 * 29, 20, 5)
    scenario = FleetScenario(16, ttft=0.5)
    ours, random = (
        simulate_fleet(replace(scenario, policy=policy), load).attainment
        for policy in (RoutingPolicy.TANDEM, RoutingPolicy.RANDOM)
    )
    assert ours > random + 0.01


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"boxes": 0}, "boxes=0"),
        ({"speeds": (1.0, 2.0)}, "2 speeds"),
        ({"report_period": 0.0}, "report_period=0.0"),
        ({"choices": 1}, "choices=1: from 2"),
        ({"boxes": 200, "choices": 100}, "choices=100"),
        ({"routers": 1, "router_down": (0, 1.0, 2.0)}, "router_down="),
        ({"routers": 2, "router_down": (2, 1.0, 2.0)}, "one of at least two routers"),
    ],
)
def test_an_impossible_fleet_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(OPEN, **changed)
