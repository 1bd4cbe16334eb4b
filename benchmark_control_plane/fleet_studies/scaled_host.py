"""A host that starts and drains boxes as `controlplane.fleet.autoscaling` asks, in virtual time."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.fleet.autoscaling import BoxScaler

_STEP = 1.0
_DRAIN_S = 20.0


@dataclass
class ScaledHost:
    """Boxes that need a time to start; a removed one runs until it has drained.

    `demand` is the work that arrives, in boxes; each box has an equal part of it, and states its utilisation
    with some noise. An overloaded box states up to five times its objective. `serving` has the boxes that
    serve in each second.
    """

    demand: Callable[[float], float]
    scaler: BoxScaler
    running: int
    noise: float
    target: int = 0
    now: float = 0.0
    starting: list[float] = field(default_factory=list)
    draining: list[float] = field(default_factory=list)
    targets: list[tuple[float, int]] = field(default_factory=list)
    overloaded: list[float] = field(default_factory=list)
    serving: list[int] = field(default_factory=list)

    def run(self, seconds: float, seed: int = 1) -> None:
        draws = random.Random(seed)
        self.target = self.target or self.running
        end = self.now + seconds
        while self.now < end:
            self._end_starts_and_drains()
            serving = self.running
            self.serving.append(serving)
            use = self.demand(self.now) / serving
            uses = [max(0.0, min(5.0, use * (1 + self.noise * draws.gauss(0, 1)))) for _ in range(serving)]
            if use > 1:
                self.overloaded.append(self.now)
            found = self.scaler.target(uses, serving + len(self.draining), self.target, self.now)
            self._work_towards(found)
            self.now += _STEP

    def _end_starts_and_drains(self) -> None:
        self.running += sum(at <= self.now for at in self.starting)
        self.starting = [at for at in self.starting if at > self.now]
        self.draining = [at for at in self.draining if at > self.now]

    def _work_towards(self, found: int) -> None:
        if found != self.target:
            self.targets.append((self.now, found))
        self.target = found
        missing = found - self.running - len(self.starting)
        self.starting += [self.now + self.scaler.rule.start] * max(0, missing)
        for _ in range(max(0, -missing)):
            self.running -= 1
            self.draining.append(self.now + _DRAIN_S)
