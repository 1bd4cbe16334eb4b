"""How far a system is ahead of the best baseline at each load, in attainment on the seeds that both have."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmark_control_plane.report import aggregates
from benchmark_control_plane.report.schema import Results


@dataclass(frozen=True)
class Lead:
    """Attainment of a system less that of another one at a load, in points.

    Attributes:
        load: multiple of the capacity.
        requests: class, or `overall`.
        other: the system compared with.
        seeds: difference on each seed that both have.
    """

    load: float
    requests: str
    other: str
    seeds: tuple[float, ...]

    @property
    def points(self) -> float:
        """Mean over the seeds."""
        return fmean(self.seeds)

    @property
    def is_lost(self) -> bool:
        """Whether the other system is ahead by what a page would show."""
        return round(self.points, 1) < 0

    @property
    def changes_sign(self) -> bool:
        """Whether either system is ahead on some seed."""
        return min(self.seeds) < 0 < max(self.seeds)


def pairings(results: Results) -> Iterator[tuple[str, list[str]]]:
    """Each system of kind tandem, and the baselines that it is compared with.

    Where there are several, an experiment has several conditions, and systems are compared whose names have
    the same text after the comma, as `tandem, 8 GiB` and `ungated, 8 GiB`; none if two have the same.
    """
    own = [system["name"] for system in results["systems"] if system["kind"] == "tandem"]
    baselines = [system["name"] for system in results["systems"] if system["kind"] == "baseline"]
    if len(own) < 2:
        yield from ((name, baselines) for name in own if baselines)
    elif len({condition(name) for name in own}) == len(own):
        for name in own:
            if same := [other for other in baselines if condition(other) == condition(name)]:
                yield name, same


def comparable(results: Results, own: str) -> list[str]:
    """The baselines of the same condition; all where no condition is stated."""
    every = [system["name"] for system in results["systems"] if system["kind"] == "baseline"]
    return dict(pairings(results)).get(own, every)


def condition(name: str) -> str:
    """The condition that the name of a system states, in an experiment with several."""
    return name.partition(", ")[2]


def lead_over(results: Results, own: str, other: str, load: float, requests: str) -> Lead | None:
    """None without a seed of both."""
    ours, theirs = (
        {
            run["seed"]: attained
            for run in aggregates.runs_of(results, system, load)
            if (attained := run["attainment"].get(requests)) is not None
        }
        for system in (own, other)
    )
    seeds = tuple(100 * (ours[seed] - theirs[seed]) for seed in sorted(ours) if seed in theirs)
    return Lead(load, requests, other, seeds) if seeds else None


def lead_over_best(results: Results, own: str, others: Sequence[str], load: float) -> Lead | None:
    """Over all requests, relative to the one of `others` that is the best at this load."""
    found = (lead_over(results, own, other, load, aggregates.OVERALL) for other in others)
    return min((lead for lead in found if lead is not None), key=lambda lead: lead.points, default=None)
