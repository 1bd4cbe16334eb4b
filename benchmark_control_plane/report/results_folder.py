"""Reads and writes a folder of results: results.json, requests.jsonl and report.html."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from benchmark_control_plane.common.command_line import BadInput, read_object
from benchmark_control_plane.common.results_file import write_atomic
from benchmark_control_plane.report import aggregates, page
from benchmark_control_plane.report.schema import Results, results_of

RESULTS, REQUESTS, PAGE = "results.json", "requests.jsonl", "report.html"


def read_results(path: Path) -> Results:
    """Reads a folder or its results.json. Raises BadInput if it is absent or does not match schema.py."""
    file = path / RESULTS if path.is_dir() else path
    return results_of(read_object(str(file)), str(file))


def replace_results(path: Path, results: Mapping[str, Any]) -> Path:
    """Replaces the results of a folder, or a results file, as it was written; returns the file."""
    file = path / RESULTS if path.is_dir() else path
    is_committed = file.name != RESULTS
    text = committed(results_of(results)) if is_committed else json.dumps(results, indent=1) + "\n"
    write_atomic(file, text)
    return file


def read_requests(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the requests; none without the file. Skips the incomplete last line of an interrupted run."""
    file = folder / REQUESTS
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = orjson.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise BadInput(f"{file}:{number}: not JSON ({error})") from error
            yield record


def write_page(source: Path) -> Path:
    """Writes the page next to its results and returns its path.

    For a results file alone, such as a committed one, the page is named after it and lacks the figures that
    need single requests.
    """
    folder = source.parent if source.name == RESULTS else source
    is_folder = folder.is_dir()
    target = folder / PAGE if is_folder else source.with_suffix(".html")
    requests = read_requests(folder) if is_folder else ()
    target.write_text(page.render(read_results(source), requests), encoding="utf-8")
    return target


def committed(results: Results) -> str:
    """JSON small enough to commit: nine digits, and memory only for the runs that a page draws."""
    loads, drawn, runs = aggregates.common_loads(results), set(), []
    for run in sorted(results["runs"], key=lambda run: run["seed"]):
        cell = (run["system"], run["load"])
        is_drawn = bool(run["valid"] and run["memory"] and run["load"] in loads and cell not in drawn)
        drawn |= {cell} if is_drawn else set()
        runs.append(run if is_drawn else {**run, "memory": None})
    lines = [
        f"{json.dumps(key)}: [\n{_lines(value)}\n]" if isinstance(value, list) and value
        else f"{json.dumps(key)}: {json.dumps(_rounded(value))}"
        for key, value in {**results, "runs": runs}.items()
    ]  # fmt: skip
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(values: list[Any]) -> str:
    return ",\n".join(json.dumps(_rounded(value)) for value in values)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
