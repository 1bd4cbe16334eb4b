"""The kept results of `tandem bench run` and of its matrices, read from a folder."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_control_plane.report import aggregates
from benchmark_control_plane.report.matrix_results import MATRIX_FORMAT, matrix_cells
from benchmark_control_plane.report.schema import FORMAT, Results, SystemInfo, results_of


@dataclass(frozen=True)
class Measured:
    """One experiment, or several that share all runs of Tandem.

    Attributes:
        files: where the results are kept.
        results: the systems of all files, each once.
    """

    files: tuple[Path, ...]
    results: Results

    @property
    def name(self) -> str:
        """The names of the experiments."""
        return " and ".join(file.stem for file in self.files)

    @property
    def heading(self) -> str:
        """Heading of the experiment's section."""
        return self.name.capitalize()

    @property
    def anchor(self) -> str:
        """Where the page has the section."""
        return self.heading.lower().replace(" ", "-")


def experiments(folder: Path) -> Iterator[tuple[Path, Results]]:
    """The results of `tandem bench run` among all result files."""
    return ((file, results_of(content, file.name)) for file, content in _of_format(folder, FORMAT))


def matrices(folder: Path) -> Iterator[tuple[Path, dict[str, Results]]]:
    """Results by cell of each matrix among all result files."""
    return ((file, matrix_cells(content, file.name)) for file, content in _of_format(folder, MATRIX_FORMAT))


def _of_format(folder: Path, wanted: int | str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("format") == wanted:
            yield file, content


def merged(found: Sequence[tuple[Path, Results]]) -> list[Measured]:
    """Each experiment; those of which all common systems, Tandem among them, have the same runs are one."""
    made: list[Measured] = []
    for file, results in found:
        same = next((each for each in made if _share_runs(each.results, results)), None)
        if same is None:
            made.append(Measured((file,), results))
        else:
            joined = Measured((*same.files, file), _joined(same.results, results))
            made[made.index(same)] = joined
    return made


def _share_runs(one: Results, other: Results) -> bool:
    tandem = aggregates.tandem_system(one)
    names, others = ({system["name"] for system in each["systems"]} for each in (one, other))
    return (
        tandem is not None
        and tandem["name"] in others
        and all(_attained(one, name) == _attained(other, name) for name in names & others)
    )


def _attained(results: Results, system: str) -> list[tuple[float, int, float | None]]:
    runs = (run for run in results["runs"] if run["system"] == system)
    return sorted((run["load"], run["seed"], run["attainment"].get(aggregates.OVERALL)) for run in runs)


def _joined(one: Results, other: Results) -> Results:
    """The first with the systems that only the second has, and descriptions that only it states."""
    stated = {system["name"]: system["description"] for system in other["systems"]}
    known = {system["name"] for system in one["systems"]}
    systems: list[SystemInfo] = [
        {**system, "description": system["description"] or stated.get(system["name"], "")}
        for system in one["systems"]
    ]
    new = stated.keys() - known
    return {
        **one,
        "systems": [*systems, *(system for system in other["systems"] if system["name"] in new)],
        "runs": [*one["runs"], *(run for run in other["runs"] if run["system"] in new)],
        "max_goodput_rate": [
            *one["max_goodput_rate"],
            *(row for row in other["max_goodput_rate"] if row["system"] in new),
        ],
    }
