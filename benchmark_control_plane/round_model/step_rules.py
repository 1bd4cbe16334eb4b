"""Step rules for the simulated engine: FCFS, random order, a round-model policy, and Apt-Serve's greedy.

`RoundPolicyRule` lets a policy of the round model (mc-sf, tandem) choose which requests start; where its
predictions were too low the engine preempts the newest request, which the policy still counts as running.
`AptServeRule` offers waiting requests by Apt-Serve's value with SLO fallback, keys and values only, into the
memory that running requests leave free; chunked prefill makes its choice of the iteration type unnecessary.
Where memory runs out, its order determines which request is preempted.
"""

from random import Random

import numpy as np

from backends.simulated.continuous_batching import SimulatedScheduler
from benchmark_control_plane.round_model.policies.step_policy import Candidate, StepPolicy
from benchmark_control_plane.round_model.step_simulator import StepObjective, SteppedRequest
from controlplane.core.memory_ledger import Floats
from controlplane.policy.cache_tiers.allocation import TierOffers, plan_tiers

_SHUFFLED = 4
_FIRST_ROWS = 256


class FcfsRule:
    """Offers requests in order of arrival, as stock vLLM does."""

    def __init__(self) -> None:
        self._new: list[SteppedRequest] = []

    def arrive(self, request: SteppedRequest) -> None:
        self._new.append(request)

    def arrange(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        engine.waiting.extend(self._new)
        self._new.clear()

    def finish(self, request: SteppedRequest) -> None:
        pass


class RandomRule(FcfsRule):
    """Draws the first few of the waiting queue at random before every step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)

    def arrange(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        super().arrange(engine, now)
        waiting = engine.waiting
        for place in range(min(_SHUFFLED, len(waiting) - 1)):
            drawn = self._random.randrange(place, len(waiting))
            waiting[place], waiting[drawn] = waiting[drawn], waiting[place]


class RoundPolicyRule:
    """Lets a policy of the round model choose the starts; `due` of a candidate is its TTFT deadline."""

    def __init__(self, policy: StepPolicy, objective: StepObjective) -> None:
        self._policy = policy
        self._objective = objective
        self._known: dict[int, tuple[SteppedRequest, Candidate]] = {}
        self._step = 0

    def arrive(self, request: SteppedRequest) -> None:
        due = request.arrival + self._objective.ttft
        candidate = Candidate(request.number, request.arrival, request.prompt, request.predicted, due)
        self._known[request.number] = (request, candidate)
        self._policy.arrive(candidate)

    def arrange(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        self._step += 1
        for candidate in self._policy.start(self._step):
            engine.waiting.append(self._known[candidate.id][0])

    def finish(self, request: SteppedRequest) -> None:
        _, candidate = self._known.pop(request.number)
        self._policy.finish(candidate, self._step + 1)


class AptServeRule:
    """Offers waiting requests by Apt-Serve's value: pending time per block, scaled down for missed deadlines.

    Waiting requests are kept as columns: start of the wait and deadline of the next token in seconds, size in
    tokens. `decay` multiplies the value of a request that missed its SLO: 0 serves it only where memory is
    left, 1 ignores the miss, 0.4 is the paper's variant for tail latency.
    """

    def __init__(self, objective: StepObjective, *, decay: float = 0.0) -> None:
        self._objective = objective
        self._decay = decay
        self._waiting: list[SteppedRequest] = []
        self._columns: Floats = np.zeros((3, _FIRST_ROWS))

    def arrive(self, request: SteppedRequest) -> None:
        self._wait(request, request.arrival, request.arrival + self._objective.ttft, request.total + 1)

    def _wait(self, request: SteppedRequest, since: float, deadline: float, tokens: int) -> None:
        count = len(self._waiting)
        if count == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._columns[:, count] = (since, deadline, tokens)
        self._waiting.append(request)

    def arrange(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        self._sync_waiting(engine, now)
        block = engine.block_tokens
        growth = sum(
            -(-request.total // block) - request.blocks for request in engine.running if request.blocks
        )
        free = engine.free_blocks - growth
        if free < 0:
            # The engine preempts from the end; the largest request gains least per block.
            engine.running.sort(key=lambda request: request.blocks)
            return
        if not self._waiting or free == 0 or len(engine.running) >= engine.max_running:
            return
        for at in self._choose(now, float(free), block):
            engine.waiting.append(self._waiting[at])

    def _sync_waiting(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        """Removes requests that joined the batch and adds those that the engine preempted."""
        joined = [at for at, request in enumerate(self._waiting) if request.blocks or request.is_removed]
        if joined:
            kept = np.ones(len(self._waiting), dtype=bool)
            kept[joined] = False
            left = self._columns[:, : len(kept)][:, kept]
            self._waiting = [request for at, request in enumerate(self._waiting) if kept[at]]
            self._columns[:, : left.shape[1]] = left
        if engine.waiting:
            known = set(map(id, self._waiting))
            for request in engine.waiting:
                if id(request) not in known and request.last is not None:
                    is_late = request.has_missed(now, self._objective)
                    deadline = -1.0 if is_late else request.last + self._objective.gap
                    self._wait(request, request.last, deadline, request.total + 1)
            engine.waiting.clear()

    def _choose(self, now: float, free: float, block: int) -> list[int]:
        """Indices of the chosen requests, by falling gain per block."""
        since, deadline, tokens = self._columns[:, : len(self._waiting)]
        blocks = np.ceil(tokens / block)
        late = now > deadline
        offers = TierOffers(
            pending=now - since,
            cells=blocks,
            shares=np.ones((1, len(blocks))),
            penalties=np.zeros((1, len(blocks))),
            weights=np.where(late, self._decay, 1.0),
        )
        held = np.flatnonzero(plan_tiers(offers, free).tiers)
        gains = offers.values()[0, held] / blocks[held]
        return [int(at) for at in held[np.argsort(-gains, kind="stable")]]

    def finish(self, request: SteppedRequest) -> None:
        pass
