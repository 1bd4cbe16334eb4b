"""How do the contenders order an engine's steps? First come, random, the step policies, Apt-Serve's greedy.

`RoundPolicyRule` lets a policy of the round model (mc-sf, tandem) say who starts; where its predictions were too
low
the engine preempts the newest, which the policy takes for running on. `AptServeRule` offers those that wait by
Apt-Serve's value with SLO fallback, keys and values only, into the memory that those which run leave free;
chunked prefill makes its choice of iteration type void. Where memory runs out, its order says who stays.
"""

from random import Random

import numpy as np

from backends.simulated.scheduler import SimulatedScheduler
from benchmark_control_plane.round_model.policies.interface import Candidate, StepPolicy
from benchmark_control_plane.round_model.step_simulator import StepObjective, SteppedRequest
from controlplane.core.memory import Floats
from controlplane.policy.cache_tiers.allocation import HybridOptions, TierOffers, plan_tiers

_DRAWN_AHEAD = 4
_FIRST_ROWS = 256


class FcfsRule:
    """As stock vLLM."""

    def __init__(self) -> None:
        self._new: list[SteppedRequest] = []

    def arrive(self, one: SteppedRequest) -> None:
        self._new.append(one)

    def arrange(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        engine.waiting.extend(self._new)
        self._new.clear()

    def finish(self, one: SteppedRequest) -> None:
        pass


class RandomRule(FcfsRule):
    """Draws the next few anew before every step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)

    def arrange(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        super().arrange(engine, now)
        waiting = engine.waiting
        for place in range(min(_DRAWN_AHEAD, len(waiting) - 1)):
            drawn = self._random.randrange(place, len(waiting))
            waiting[place], waiting[drawn] = waiting[drawn], waiting[place]


class RoundPolicyRule:
    """`due` of a candidate is its first-token deadline."""

    def __init__(self, policy: StepPolicy, objective: StepObjective) -> None:
        self._policy = policy
        self._objective = objective
        self._known: dict[int, tuple[SteppedRequest, Candidate]] = {}
        self._step = 0

    def arrive(self, one: SteppedRequest) -> None:
        due = one.arrival + self._objective.ttft
        candidate = Candidate(one.number, one.arrival, one.prompt, one.predicted, due)
        self._known[one.number] = (one, candidate)
        self._policy.arrive(candidate)

    def arrange(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        self._step += 1
        for candidate in self._policy.start(self._step):
            engine.waiting.append(self._known[candidate.id][0])

    def finish(self, one: SteppedRequest) -> None:
        _, candidate = self._known.pop(one.number)
        self._policy.finish(candidate, self._step + 1)


class AptServeRule:
    """Candidates are kept as columns: since when they wait, the deadline of their next token, their size."""

    def __init__(self, objective: StepObjective, options: HybridOptions) -> None:
        self._objective = objective
        self._options = options
        self._waiting: list[SteppedRequest] = []
        self._columns: Floats = np.zeros((3, _FIRST_ROWS))

    def arrive(self, one: SteppedRequest) -> None:
        self._wait(one, one.arrival, one.arrival + self._objective.ttft, one.total + 1)

    def _wait(self, one: SteppedRequest, since: float, deadline: float, tokens: int) -> None:
        count = len(self._waiting)
        if count == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._columns[:, count] = (since, deadline, tokens)
        self._waiting.append(one)

    def arrange(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        self._take_back(engine, now)
        block = engine.block_tokens
        growth = sum(-(-one.total // block) - one.blocks for one in engine.running if one.blocks)
        free = engine.free_blocks - growth
        if free < 0:
            # The engine preempts from the end: least gained per block, as the greedy drops it.
            engine.running.sort(key=lambda one: one.blocks)
            return
        if not self._waiting or free == 0 or len(engine.running) >= engine.max_running:
            return
        for at in self._chosen(now, float(free), block):
            engine.waiting.append(self._waiting[at])

    def _take_back(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        """Who joined is no candidate any more; who was preempted is one again."""
        joined = [at for at, one in enumerate(self._waiting) if one.blocks or one.is_gone]
        if joined:
            kept = np.ones(len(self._waiting), dtype=bool)
            kept[joined] = False
            left = self._columns[:, : len(kept)][:, kept]
            self._waiting = [one for at, one in enumerate(self._waiting) if kept[at]]
            self._columns[:, : left.shape[1]] = left
        if engine.waiting:
            known = set(map(id, self._waiting))
            for one in engine.waiting:
                if id(one) not in known and one.last is not None:
                    is_lost = one.has_missed(now, self._objective)
                    deadline = -1.0 if is_lost else one.last + self._objective.gap
                    self._wait(one, one.last, deadline, one.total + 1)
            engine.waiting.clear()

    def _chosen(self, now: float, free: float, block: int) -> list[int]:
        """Indices by falling gain per block."""
        since, deadline, tokens = self._columns[:, : len(self._waiting)]
        blocks = np.ceil(tokens / block)
        late = now > deadline
        offers = TierOffers(
            pending=now - since,
            cells=blocks,
            shares=np.ones((1, len(blocks))),
            penalties=np.zeros((1, len(blocks))),
            weights=np.where(late, self._options.decay, 1.0),
        )
        held = np.flatnonzero(plan_tiers(offers, free).tiers)
        gains = offers.values()[0, held] / blocks[held]
        return [int(at) for at in held[np.argsort(-gains, kind="stable")]]

    def finish(self, one: SteppedRequest) -> None:
        pass
