"""What a simulated fleet consists of, what arrives, and what came of it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]
REPORT_PHASES = 16
"""Groups of boxes whose reports are spread over the report period; all of a group report at a time."""


class RoutingPolicy(IntEnum):
    """How a router chooses a box."""

    ROUND_ROBIN = 0
    LEAST_CONNECTIONS = 1
    RANDOM = 2
    BEST_OF_ALL = 3
    PREFIX_STICKY = 4
    TANDEM = 5
    TANDEM_REPORT_ONLY = 6


class FleetOutcome(IntEnum):
    """How a request of a simulated fleet ended."""

    UNFINISHED = 0
    MET = 1
    LATE = 2
    REJECTED = 3
    LOST = 4


@dataclass(frozen=True, slots=True)
class BoxModel:
    """One box: its engine's step time and sizes.

    A step takes `step` seconds, `per_prompt_token` for each prompt token in it, `per_sequence` for each
    decoding sequence and `per_cell` for each token in the KV cache of these.
    """

    step: float = 5e-3
    per_prompt_token: float = 33.3e-6
    per_sequence: float = 3e-5
    per_cell: float = 4e-8
    step_tokens: int = 2_048
    kv_tokens: int = 400_000
    max_running: int = 256
    cached_prefixes: int = 32


@dataclass(frozen=True, slots=True)
class FleetWorkload:
    """Requests in the order of arrival; arrays of one length.

    `group` is the shared prefix that a prompt begins with, or its conversation, -1 without one. `shared` are
    the tokens that an earlier prompt with it, or the output of that, has too. `named` are those that routers
    take for these: of a conversation the whole prompt, and 0 where they are told of no prefix.
    """

    at: Floats
    prompt_tokens: Tokens
    output_tokens: Tokens
    group: Tokens
    shared: Tokens
    named: Tokens

    def __len__(self) -> int:
        return len(self.at)

    @classmethod
    def drawn(
        cls,
        rate: float,
        seconds: float,
        seed: int | Sequence[int],
        *,
        median_prompt: float = 400.0,
        groups: int = 0,
        shared_tokens: int = 0,
        burst: float = 1.0,
    ) -> Self:
        """Poisson arrivals with log-normal lengths; outputs have a median of 120 tokens, at most 1,000.

        Args:
            rate: requests per second.
            seconds: time of the last arrival.
            seed: of the random numbers; several numbers are one seed.
            median_prompt: tokens, deviation of the logarithm 1, at most 8,000.
            groups: shared prefixes; the n-th is used in proportion to 1/n.
            shared_tokens: tokens of a shared prefix, which precede the rest of the prompt.
            burst: factor of the rate in 2 of every 10 seconds; the mean is kept.
        """
        rng = np.random.default_rng(seed)
        count = round(rate * seconds)
        at = np.sort(rng.uniform(0.0, seconds, count))
        if burst != 1.0:
            # Time is stretched where the rate is low: each 10 s begin with 2 s at `burst` times the rate.
            part = at % 10.0
            head = 2.0 * burst
            at = at - part + np.where(part < head, part / burst, 2.0 + (part - head) * 8.0 / (10.0 - head))
        prompt = np.clip(rng.lognormal(np.log(median_prompt), 1.0, count), 8, 8_000).astype(np.int32)
        output = np.clip(rng.lognormal(np.log(120.0), 0.8, count), 2, 1_000).astype(np.int32)
        group, shared = np.full(count, -1, np.int32), np.zeros(count, np.int32)
        if groups:
            popularity = 1.0 / np.arange(1, groups + 1)
            group = rng.choice(groups, count, p=popularity / popularity.sum()).astype(np.int32)
            shared[:] = shared_tokens
            prompt += shared_tokens
        return cls(at, prompt, output, group, shared, shared)

    @classmethod
    def conversations(
        cls,
        rate: float,
        seconds: float,
        seed: int | Sequence[int],
        *,
        median_message: float,
        turns: float,
        pause: float,
    ) -> Self:
        """Conversations, of which many have begun before: each prompt has all earlier messages and outputs.

        A conversation ends before a prompt of more than 8,000 tokens. Outputs are those of `drawn`.

        Args:
            rate: requests per second.
            seconds: time of the last arrival.
            seed: of the random numbers; several numbers are one seed.
            median_message: tokens that a turn adds, deviation of the logarithm 1.
            turns: mean of their number, which is geometric.
            pause: mean seconds, exponential, from the end of an output, at 50 ms a token, to the next turn.

        Raises ValueError if most turns would be longer.
        """
        rng = np.random.default_rng(seed)
        count, before = round(rate * seconds), 4 * turns * (pause + 8.0)
        begun = round(2 * rate * (seconds + before) / turns)
        length = rng.geometric(1 / turns, begun)
        first = np.cumsum(length) - length
        group = np.repeat(np.arange(begun, dtype=np.int32), length)

        def earlier(column: Floats | Ints) -> Floats | Ints:
            """Sums over the earlier turns of the conversation."""
            sums = np.cumsum(column) - column
            return sums - sums[first][group]

        message = np.clip(rng.lognormal(np.log(median_message), 1.0, len(group)), 8, 8_000).astype(np.int64)
        output = np.clip(rng.lognormal(np.log(120.0), 0.8, len(group)), 2, 1_000).astype(np.int64)
        taken = 0.05 * output + rng.exponential(pause, len(group))
        at = rng.uniform(-before, seconds, begun)[group] + earlier(taken)
        shared = earlier(message + output).astype(np.int32)
        prompt = shared + message.astype(np.int32)
        kept = np.flatnonzero((at >= 0) & (at < seconds) & (prompt <= 8_000))[:count]
        if len(kept) < count:
            raise ValueError(f"median_message={median_message}, turns={turns}: too many prompts above 8,000")
        kept = kept[np.argsort(at[kept])]
        numbers = np.unique(group[kept], return_inverse=True)[1].astype(np.int32)
        return cls(at[kept], prompt[kept], output[kept].astype(np.int32), numbers, shared[kept], prompt[kept])


@dataclass(frozen=True, slots=True)
class FleetScenario:
    """A fleet, its routers and its faults.

    Attributes:
        boxes: number of boxes.
        box: the box of speed 1.
        speeds: speed of each box, which weighs the draws; empty if all have speed 1.
        policy: of every router.
        routers: requests go to them in turn.
        report_period: seconds between two reports of a box.
        ttft: objective in seconds, by which boxes reject.
        tpot: objective in seconds for the mean after the first token.
        has_admission: boxes reject requests that would be late.
        retries: routers may try another box after a refusal.
        choices: boxes that Tandem's policy compares: 2 as it is served, or more, at most 64 or all.
        down: (box, from, until) in seconds; what runs on the box then is lost, and it refuses connections.
        router_down: (router, from, until) in seconds; the others get its requests meanwhile.
        seed: of the routers' draws.
    """

    boxes: int
    box: BoxModel = field(default_factory=BoxModel)
    speeds: tuple[float, ...] = ()
    policy: RoutingPolicy = RoutingPolicy.TANDEM
    routers: int = 4
    report_period: float = 0.2
    ttft: float = 1.0
    tpot: float = 0.05
    has_admission: bool = True
    retries: bool = True
    choices: int = 2
    down: tuple[tuple[int, float, float], ...] = ()
    router_down: tuple[int, float, float] | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        if self.boxes < 1 or self.routers < 1 or (self.speeds and len(self.speeds) != self.boxes):
            raise ValueError(
                f"boxes={self.boxes}, routers={self.routers}, {len(self.speeds)} speeds: at least one box "
                "and one router, and a speed for each box or none"
            )
        if min(self.report_period, *self.speeds, 1.0) <= 0:
            raise ValueError(f"report_period={self.report_period}: the period and all speeds are positive")
        if self.choices < 2 or 64 < self.choices < self.boxes:
            raise ValueError(f"choices={self.choices}: from 2 to 64, or all boxes")
        is_there = self.router_down is None or (self.routers > 1 and 0 <= self.router_down[0] < self.routers)
        if not is_there:
            raise ValueError(
                f"router_down={self.router_down}, routers={self.routers}: one of at least two routers"
            )


@dataclass(frozen=True, slots=True)
class FleetResult:
    """One row for each request of the workload, and totals.

    Attributes:
        outcome: `FleetOutcome` of each request.
        ttft: seconds from arrival to first token; NaN without one.
        tpot: seconds per output token after the first; NaN without a second.
        box: box of the last try, -1 without one.
        cached: prompt tokens that were found in a prefix cache.
        events: events of the simulation.
        retries: second tries.
        seconds: wall time of the run.
    """

    outcome: npt.NDArray[np.int8]
    ttft: npt.NDArray[np.float32]
    tpot: npt.NDArray[np.float32]
    box: npt.NDArray[np.int32]
    cached: Tokens
    events: int
    retries: int
    seconds: float

    @property
    def attainment(self) -> float:
        """Share of all requests that met their objectives; rejected and lost ones did not."""
        return self.share(FleetOutcome.MET)

    def of(self, kept: npt.NDArray[np.bool_]) -> Self:
        """The rows of some requests, with the totals of all."""
        return replace(
            self, outcome=self.outcome[kept], ttft=self.ttft[kept], tpot=self.tpot[kept], box=self.box[kept],
            cached=self.cached[kept],
        )  # fmt: skip

    def share(self, outcome: FleetOutcome) -> float:
        """Share of all requests with this outcome."""
        return float(np.mean(self.outcome == outcome))

    def ttft_quantile(self, level: float) -> float:
        """Quantile of the TTFT of requests that had a first token, in seconds."""
        seen = self.ttft[~np.isnan(self.ttft)]
        return float(np.quantile(seen, level)) if len(seen) else float("nan")

    @property
    def trace_hash(self) -> str:
        """SHA-256 over the rows; equal hashes mean equal runs."""
        digest = hashlib.sha256()
        for column in (self.outcome, self.ttft, self.tpot, self.box):
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()
