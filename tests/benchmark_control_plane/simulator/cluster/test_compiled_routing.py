"""The compiled routers choose as the routing library does."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark_control_plane.simulator.cluster import compiled_routing as compiled
from benchmark_control_plane.simulator.cluster.scenario import (
    BoxModel,
    FleetScenario,
    FleetWorkload,
    RoutingPolicy,
)
from controlplane.fleet.load_report import LoadReport, ModelLoad, OwnerLoad
from controlplane.fleet.router import RoutedRequest, Router

pytestmark = pytest.mark.long

SHARED = 512
MODEL = BoxModel(per_prompt_token=1e-4)

event = st.one_of(
    st.tuples(st.just("report"), st.integers(0, 4), st.floats(0, 2), st.integers(0, 20_000)),
    st.tuples(st.just("request"), st.integers(SHARED, 8_000), st.integers(-1, 3), st.booleans()),
    st.tuples(st.just("pause"), st.floats(0.01, 0.7), st.just(0), st.just(0)),
)


def report(number: int, intercept: float, free: int, speed: float) -> LoadReport:
    return LoadReport(
        "a",
        number,
        0.0,
        {"m": ModelLoad("llm", MODEL.per_prompt_token / speed, 1)},
        {"llm": OwnerLoad({"c": intercept}, 0.0, free)},
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.5, 4.0), min_size=5, max_size=5), st.lists(event, max_size=60), st.integers(0, 99)
)
def test_choices_are_those_of_the_library(
    speeds: list[float], events: list[tuple[str, float, float, int]], seed: int
) -> None:
    empty = np.zeros(0, np.int32)
    scenario = FleetScenario(5, MODEL, tuple(speeds), routers=1, seed=seed)
    groups = FleetWorkload(np.zeros(1), empty, empty, np.array([7], np.int32), empty, empty)
    arrays, numbers = compiled.new_routers(scenario, groups), compiled.numbers_of(scenario)
    router = Router()
    for box, speed in enumerate(speeds):
        router.add(str(box), speed)
        router.heard(str(box), report(0, 0.0, 10_000, speed), 0.0)
        compiled.report(arrays, box, 0.0, 10_000.0, 0.0)
    now = 0.0
    for number, (kind, one, two, three) in enumerate(events, start=1):
        if kind == "pause":
            now += one
        elif kind == "report":
            box = int(one)
            router.heard(str(box), report(number, two, three, speeds[box]), now)
            compiled.report(arrays, box, two, float(three), now)
            # The library also counts what was sent in the last 2 ms; the model knows no such delay.
            now += 0.01
        else:
            prompt, group = int(one), int(two)
            request, shared = RoutedRequest("m", "c", prompt, 1.0), 0
            if three and group >= 0:
                group, shared = group + 4, prompt
                request = replace(request, session=str(group))
            elif group >= 0:
                request, shared = replace(request, prefix=str(group), prefix_tokens=SHARED), SHARED
            draws = (compiled.uniform(seed, number, 0), compiled.uniform(seed, number, 1))
            choice = router.choose(request, now, draws)
            chosen = compiled.choose(arrays, numbers, 0, number, prompt, group, shared, now)
            assert choice is not None
            assert choice.box == str(chosen)
            router.sent(request, choice, now)
            compiled.record_send(arrays, 0, chosen, prompt, group, shared)
            now += 0.01


def test_draws_are_uniform_and_depend_on_each_number() -> None:
    draws = np.array([compiled.uniform(1, request, 0) for request in range(4_000)])
    assert np.histogram(draws, 10, (0, 1))[0] == pytest.approx(400, abs=100)
    different = {
        compiled.uniform(seed, request, n) for seed in (1, 2) for request in (1, 2) for n in range(4)
    }
    assert len(different) == 16


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(RoutingPolicy.ROUND_ROBIN, [1, 2, 3, 0, 1]), (RoutingPolicy.PREFIX_STICKY, None)],
)
def test_the_other_policies(policy: RoutingPolicy, expected: list[int] | None) -> None:
    scenario = FleetScenario(4, policy=policy, routers=1)
    arrays = compiled.new_routers(scenario, FleetWorkload.drawn(10, 1, 1, groups=2, shared_tokens=16))
    numbers = compiled.numbers_of(scenario)
    chosen = [int(compiled.choose(arrays, numbers, 0, at, 100, 1, 16, 0.0)) for at in range(5)]
    assert chosen == (expected or [chosen[0]] * 5)


@pytest.mark.parametrize("policy", [RoutingPolicy.TANDEM, RoutingPolicy.PREFIX_STICKY])
def test_a_prefix_that_routers_are_not_told_of_changes_no_choice(policy: RoutingPolicy) -> None:
    scenario = FleetScenario(20, policy=policy, routers=1)
    arrays = compiled.new_routers(scenario, FleetWorkload.drawn(10, 1, 1, groups=2, shared_tokens=16))
    numbers = compiled.numbers_of(scenario)
    chosen = [
        [compiled.choose(arrays, numbers, 0, at, 100, group, 0, 0.0) for at in range(50)] for group in (-1, 1)
    ]
    assert chosen[0] == chosen[1] and len(set(chosen[0])) > 10


@pytest.mark.parametrize("policy", [RoutingPolicy.ROUND_ROBIN, RoutingPolicy.LEAST_CONNECTIONS])
def test_a_fast_box_gets_its_part_from_the_policies_without_reports(policy: RoutingPolicy) -> None:
    """A proxy in use has weights for boxes of unequal speed, too."""
    scenario = FleetScenario(3, speeds=(0.5, 1.0, 1.5), policy=policy, routers=1)
    arrays = compiled.new_routers(scenario, FleetWorkload.drawn(10, 1, 1))
    numbers = compiled.numbers_of(scenario)
    counts = np.zeros(3)
    for request in range(600):
        box = compiled.choose(arrays, numbers, 0, request, 100, -1, 0, 0.0)
        compiled.record_send(arrays, 0, box, 100, -1, 0)
        counts[box] += 1
    assert counts == pytest.approx([100, 200, 300], abs=3)
