"""Routers of a simulated fleet, compiled from the rules of the routing library (`controlplane.fleet`).

A test holds the choices equal to those of `controlplane.fleet.router.Router`. Draws are a hash of seed,
request and number, so they do not depend on the order of events.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmark_control_plane.simulator.cluster.compiling import compiled
from benchmark_control_plane.simulator.cluster.scenario import (
    FleetScenario,
    FleetWorkload,
    Floats,
    Ints,
    RoutingPolicy,
)
from controlplane.fleet import routing_rules
from controlplane.fleet.affinity import PrefixHomes
from controlplane.fleet.router import RoutingOptions

predicted_ttft = compiled(routing_rules.predicted_ttft)
drawn_box = compiled(routing_rules.drawn_box)
drawn_other = compiled(routing_rules.drawn_other)
is_better = compiled(routing_rules.is_better)
may_retry = compiled(routing_rules.may_retry)

REQUEST_TOKENS, PREFIX_WORTH = routing_rules.REQUEST_TOKENS, routing_rules.PREFIX_WORTH
_ROUND_ROBIN, _LEAST_CONNECTIONS = int(RoutingPolicy.ROUND_ROBIN), int(RoutingPolicy.LEAST_CONNECTIONS)
_RANDOM, _BEST_OF_ALL = int(RoutingPolicy.RANDOM), int(RoutingPolicy.BEST_OF_ALL)
_PREFIX_STICKY = int(RoutingPolicy.PREFIX_STICKY)
_REPORT_ONLY = int(RoutingPolicy.TANDEM_REPORT_ONLY)
# So that draws of different requests differ; only this many are drawn unless all are compared.
_MOST_CHOICES = 64
# Multiples of it are spread evenly over the unit interval.
_GOLDEN_RATIO = 0.6180339887498949


class RouterArrays(NamedTuple):
    """What routers know: of each box, or of each box and router, in this order of indices.

    `intercept`, `free` and `described_at` are of the last report, which all routers hear. `sent` and
    `sent_tokens` are own sends since then, in seconds of prefill and in tokens of memory. `homes` are those
    of each shared prefix or conversation, whose number names it.
    """

    per_token: Floats
    cumulative: Floats
    intercept: Floats
    free: Floats
    described_at: Floats
    sent: Floats
    sent_tokens: Floats
    open: npt.NDArray[np.int32]
    turn: Ints
    homes: npt.NDArray[np.int32]
    budget: Floats


class RoutingNumbers(NamedTuple):
    """Parameters of all routers."""

    policy: int
    seed: int
    useful_for: float
    retry_share: float
    retry_burst: float
    retry_headroom: float
    ttft: float
    retries: bool
    choices: int
    lost_router: int
    lost_from: float
    lost_until: float


def numbers_of(scenario: FleetScenario) -> RoutingNumbers:
    """The options of the routing library, and what the scenario states."""
    options = RoutingOptions()
    lost = scenario.router_down or (-1, 0.0, 0.0)
    return RoutingNumbers(
        int(scenario.policy), scenario.seed, options.useful_for, options.retry_share, options.retry_burst,
        options.retry_headroom, scenario.ttft, scenario.retries, scenario.choices, *lost,
    )  # fmt: skip


def new_routers(scenario: FleetScenario, workload: FleetWorkload) -> RouterArrays:
    """Routers that have heard of no box yet."""
    boxes, routers = scenario.boxes, scenario.routers
    speeds = np.array(scenario.speeds or np.ones(boxes), np.float64)
    homes = PrefixHomes([str(box) for box in range(boxes)], speeds.tolist())
    groups = range(max(1, int(workload.group.max(initial=-1)) + 1))
    pairs = (boxes, routers)
    return RouterArrays(
        scenario.box.per_prompt_token / speeds,
        np.cumsum(speeds),
        np.zeros(boxes),
        np.zeros(boxes),
        np.full(boxes, -np.inf),
        np.zeros(pairs),
        np.zeros(pairs),
        np.zeros(pairs, np.int32),
        np.zeros(routers, np.int64),
        np.array([[int(box) for box in homes.of(str(group))] for group in groups], np.int32),
        np.full(routers, RoutingOptions().retry_burst),
    )


@compiled
def uniform(seed: int, request: int, number: int) -> float:
    """A number in [0, 1) from the seed, the request and the number of the draw (SplitMix64)."""
    state = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(4 * request + number)
    state = (state + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((state ^ (state >> np.uint64(31))) >> np.uint64(11)) / 9007199254740992.0


@compiled
def router_of(numbers: RoutingNumbers, routers: int, request: int, now: float) -> int:
    """The router that a request is sent to: each in turn; those of a lost one go to the others in turn."""
    r = request % routers
    if r == numbers.lost_router and numbers.lost_from <= now < numbers.lost_until:
        return (r + 1 + request // routers % (routers - 1)) % routers
    return r


@compiled
def cached_tokens(routers: RouterArrays, box: int, group: int, shared: int) -> int:
    """Leading tokens that the box is taken to have, as a home of the prefix."""
    if group >= 0:
        for at in range(routers.homes.shape[1]):
            if routers.homes[group, at] == box:
                return shared
    return 0


@compiled
def forecast(
    routers: RouterArrays, numbers: RoutingNumbers, r: int, box: int, prompt: int, cached: int
) -> float:
    """Predicted TTFT at a box."""
    sent = 0.0 if numbers.policy == _REPORT_ONLY else routers.sent[box, r]
    return predicted_ttft(routers.intercept[box], sent, routers.per_token[box], prompt, cached)


@compiled
def _missing(routers: RouterArrays, numbers: RoutingNumbers, r: int, box: int, prompt: int) -> float:
    taken = 0.0 if numbers.policy == _REPORT_ONLY else routers.sent_tokens[box, r]
    return max(0.0, prompt + taken - routers.free[box])


@compiled
def _is_preferred(
    routers: RouterArrays, numbers: RoutingNumbers, r: int, other: int, first: int, prompt: int, group: int,
    shared: int, now: float, bonus: float = 0.0,
) -> bool:  # fmt: skip
    """Whether the box `other` is better than `first`, by more than a bonus in seconds."""
    return is_better(
        now - routers.described_at[other],
        _missing(routers, numbers, r, other, prompt),
        forecast(routers, numbers, r, other, prompt, cached_tokens(routers, other, group, shared)),
        now - routers.described_at[first],
        _missing(routers, numbers, r, first, prompt),
        forecast(routers, numbers, r, first, prompt, cached_tokens(routers, first, group, shared)) - bonus,
        numbers.useful_for,
    )


@compiled
def best_of_drawn(
    routers: RouterArrays,
    numbers: RoutingNumbers,
    r: int,
    request: int,
    prompt: int,
    group: int,
    shared: int,
    now: float,
) -> int:
    """The best of two boxes that are drawn; of more in a study, up to all."""
    first = drawn_box(routers.cumulative, uniform(numbers.seed, request, 0))
    other = drawn_other(routers.cumulative, first, uniform(numbers.seed, request, 1))
    best = first
    if other != first and _is_preferred(routers, numbers, r, other, first, prompt, group, shared, now):
        best = other
    count = len(routers.cumulative)
    if numbers.choices >= count:
        for _ in range(count - 1):
            other = (other + 1) % count
            if _is_preferred(routers, numbers, r, other, best, prompt, group, shared, now):
                best = other
        return best
    for number in range(numbers.choices - 2):
        other = drawn_box(routers.cumulative, uniform(numbers.seed, _MOST_CHOICES * request + number, 3))
        if other != best and _is_preferred(routers, numbers, r, other, best, prompt, group, shared, now):
            best = other
    return best


@compiled
def weight_of(routers: RouterArrays, box: int) -> float:
    """The relative speed of a box."""
    before = routers.cumulative[box - 1] if box > 0 else 0.0
    return routers.cumulative[box] - before


@compiled
def in_turn(routers: RouterArrays, r: int) -> int:
    """The next box of a router in turn, where a box has turns in proportion to its weight.

    Turns are one mean weight apart on the running sums, and each round begins at another place, so that a box
    of less than the mean weight has its turn in some rounds.
    """
    count = len(routers.cumulative)
    routers.turn[r] += 1
    turn = routers.turn[r] + r * (count // len(routers.turn))
    place = turn % count + (turn // count + 0.5) * _GOLDEN_RATIO % 1.0
    return drawn_box(routers.cumulative, place / count)


@compiled
def choose(
    routers: RouterArrays,
    numbers: RoutingNumbers,
    r: int,
    request: int,
    prompt: int,
    group: int,
    shared: int,
    now: float,
) -> int:
    """The box that router `r` chooses by its policy; the scans over all boxes begin at a random one."""
    if shared == 0:
        group = -1
    count = len(routers.cumulative)
    first = uniform(numbers.seed, request, 0)
    if numbers.policy == _ROUND_ROBIN:
        return in_turn(routers, r)
    if numbers.policy == _RANDOM:
        return drawn_box(routers.cumulative, first)
    if numbers.policy == _PREFIX_STICKY:
        if group < 0:
            return drawn_box(routers.cumulative, first)
        return drawn_box(routers.cumulative, uniform(numbers.seed, group, 3))
    if numbers.policy == _LEAST_CONNECTIONS or numbers.policy == _BEST_OF_ALL:
        start = int(first * count)
        best, least = start, np.inf
        for at in range(count):
            box = (start + at) % count
            if numbers.policy == _LEAST_CONNECTIONS:
                cost = (routers.open[box, r] + 1) / weight_of(routers, box)
            else:
                cached = cached_tokens(routers, box, group, shared)
                cost = forecast(routers, numbers, r, box, prompt, cached)
            if cost < least:
                best, least = box, cost
        return best
    best = best_of_drawn(routers, numbers, r, request, prompt, group, shared, now)
    if group >= 0:
        for at in range(routers.homes.shape[1]):
            home = routers.homes[group, at]
            bonus = PREFIX_WORTH * routers.per_token[home] * shared
            if not _is_preferred(routers, numbers, r, best, home, prompt, group, shared, now, bonus):
                return home
    return best


@compiled
def record_send(routers: RouterArrays, r: int, box: int, prompt: int, group: int, shared: int) -> None:
    """Counts a request that router `r` sends to a box."""
    tokens = REQUEST_TOKENS + max(1, prompt - cached_tokens(routers, box, group, shared))
    routers.sent[box, r] += routers.per_token[box] * tokens
    routers.sent_tokens[box, r] += prompt
    routers.open[box, r] += 1


@compiled
def report(routers: RouterArrays, box: int, intercept: float, free: float, now: float) -> None:
    """Gives a report of a box to all routers."""
    routers.intercept[box], routers.free[box], routers.described_at[box] = intercept, free, now
    routers.sent[box, :] = 0.0
    routers.sent_tokens[box, :] = 0.0
