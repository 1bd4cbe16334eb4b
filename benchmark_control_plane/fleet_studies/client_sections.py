"""Schemas of the studies whose clients come back, or belong to tenants."""

from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from benchmark_control_plane.fleet_studies.study_file import FileName, FleetSection, Policies, Seeds
from benchmark_control_plane.judge.experiment_schema import Positive
from controlplane.config.fields import STRICT, Name

_QUICK_S = 2.0


class RejectedClient(StrEnum):
    """What a client does after a rejection."""

    LEAVES = "leaves"
    MILLISECONDS = "milliseconds"
    """It comes back after `retry-after-ms`."""
    WHOLE_SECONDS = "whole-seconds"
    """It comes back after `retry-after`, which is rounded up."""
    ONE_SECOND = "one-second"
    """It comes back after a second, whatever is stated."""


@section(frozen=True, config=STRICT)
class BurstSection:
    """Requests that arrive in addition, from `at` for so many `seconds`, at this rate per box."""

    at: Positive
    seconds: Positive
    rate_per_box: Positive


@section(frozen=True, config=STRICT)
class StormStudy:
    """A burst whose rejected clients come back, by the gate-exact simulation.

    Attributes:
        rate_per_box: requests per second and box without the burst.
        seconds: until the last arrival.
        tries: most tries of a request.
        clients: what rejected clients do.
        retries: whether routers may try a second box.
    """

    name: FileName
    question: Name
    fleet: FleetSection
    rate_per_box: Positive
    burst: BurstSection
    seconds: Positive
    tries: Annotated[int, Field(ge=2, le=20)]
    clients: Annotated[tuple[RejectedClient, ...], Field(min_length=1)]
    retries: Annotated[tuple[bool, ...], Field(min_length=1)] = (True,)
    seeds: Seeds = (1, 2)

    def __post_init__(self) -> None:
        if (end := self.burst.at + self.burst.seconds) + 1 > self.seconds:
            raise ValueError(f"seconds={self.seconds:g}: should be a second above the end of burst, {end:g}")

    def quick(self) -> Self:
        """The last kind of client on one box and one seed, for a second after a burst of a second."""
        burst = replace(self.burst, at=1.0, seconds=1.0)
        return replace(
            self, fleet=replace(self.fleet, boxes=1), burst=burst, seconds=3.0, clients=self.clients[-1:],
            retries=self.retries[:1], seeds=self.seeds[:1],
        )  # fmt: skip


@section(frozen=True, config=STRICT)
class FairnessStudy:
    """Two tenants of equal weight on a fleet that is too small for both, by the gate-exact simulation.

    The prompts of the `wide` tenant share nothing, those of the `narrow` one begin with `prefixes` of
    `prefix_tokens` each, so that routing by prefixes keeps it on few boxes.

    Attributes:
        rate_per_box: requests per second and box of each tenant.
        warm_up: seconds whose requests load the boxes and are not counted.
        exchange_s: seconds between two exchanges of the tenants' counters; null for none.
    """

    name: FileName
    question: Name
    fleet: FleetSection
    rate_per_box: Positive
    prefixes: Annotated[int, Field(ge=1)]
    prefix_tokens: Annotated[int, Field(ge=1, le=4_000)]
    seconds: Positive
    warm_up: Annotated[float, Field(ge=0)]
    policies: Policies
    exchange_s: Annotated[tuple[Positive | None, ...], Field(min_length=1)]
    seeds: Seeds = (1, 2)

    def __post_init__(self) -> None:
        if self.warm_up >= self.seconds:
            raise ValueError(f"warm_up={self.warm_up:g}: should be below seconds={self.seconds:g}")

    def quick(self) -> Self:
        """The first policy and the last exchange on one seed, for two seconds."""
        return replace(
            self, warm_up=0.0, seconds=_QUICK_S, policies=self.policies[:1], exchange_s=self.exchange_s[-1:],
            seeds=self.seeds[:1],
        )  # fmt: skip
