"""Runs a policy, chosen by name, on a list of requests in the round model."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from backends.cost_models.step_time import StepTime, pace
from benchmark_control_plane.round_model.policies.policy_table import STEP_POLICIES
from benchmark_control_plane.round_model.policies.step_policy import Candidate, StepOptions, StepPolicy
from benchmark_control_plane.round_model.simulator import RoundArrival, RoundTotals, simulate
from benchmark_control_plane.round_model.workloads import RoundRequest
from controlplane.policy.registry import lookup


@dataclass(frozen=True, slots=True)
class PolicySetting:
    """A policy by name with its options; `step_time` None counts in rounds instead of seconds."""

    policy: str
    alpha: float = 0.0
    beta: float = 0.0
    seed: int = 0
    step_time: StepTime | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Result of one run, in rounds or seconds; the lists are indexed like the given requests."""

    start: list[float]
    finish: list[float]
    latency: list[float]
    totals: RoundTotals

    @property
    def total_latency(self) -> float:
        return sum(self.latency)

    @property
    def mean_latency(self) -> float:
        return self.total_latency / len(self.latency) if self.latency else 0.0


def build_policy(setting: PolicySetting, memory: int) -> StepPolicy:
    """Builds the policy for `memory` cells. Raises ValueError on an unknown policy or a bad option."""
    step_seconds, prompt_steps = 1.0, 0.0
    if setting.step_time is not None:
        step_seconds, prompt_seconds = pace(setting.step_time, memory)
        prompt_steps = prompt_seconds / step_seconds
    options = StepOptions(
        memory=memory,
        alpha=setting.alpha,
        beta=setting.beta,
        draw=Random(setting.seed).random,
        step_time=step_seconds,
        prompt_steps=prompt_steps,
    )
    return lookup("policy", STEP_POLICIES, setting.policy)(options)


def sorted_arrivals(requests: Sequence[RoundRequest]) -> list[RoundArrival]:
    """The requests in order of arrival; the id is the index, so ties do not depend on hashing."""
    by_index = [
        RoundArrival(
            Candidate(i, request.arrival, request.prompt, request.predicted, request.due), request.output
        )
        for i, request in enumerate(requests)
    ]
    return sorted(by_index, key=lambda arrival: (arrival.candidate.arrival, arrival.candidate.id))


def run_policy(requests: Sequence[RoundRequest], memory: int, setting: PolicySetting) -> Schedule:
    """Simulates the requests under the policy.

    Raises ValueError on bad settings, NoProgress if the policy clears repeatedly without a completion.
    """
    start = [0.0] * len(requests)
    finish = [0.0] * len(requests)

    def record(arrival: RoundArrival, started: float, ended: float) -> None:
        start[arrival.candidate.id] = started
        finish[arrival.candidate.id] = ended

    totals = simulate(
        sorted_arrivals(requests),
        memory=memory,
        policy=build_policy(setting, memory),
        step_time=setting.step_time,
        on_finish=record,
    )
    latency = [end - request.arrival for end, request in zip(finish, requests, strict=True)]
    return Schedule(start, finish, latency, totals)
