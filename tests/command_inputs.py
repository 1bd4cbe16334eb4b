"""Writes small files and folders under the names that the documented commands read."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import yaml

from benchmark_control_plane.experiments.gate.tuning_gain import machine, offered
from benchmark_control_plane.simulator.simulation import simulate
from controlplane.cli import main
from tests.benchmark_control_plane.capacity.test_capacity_command import CHAT, ENCODER
from tests.benchmark_control_plane.tuning.test_tune_command import MINE
from tests.public_data_samples import write_public_data
from tests.test_docs import ROOT


def model(content: Mapping[str, object]) -> Callable[[Path], None]:
    """Writes a model's folder with the config.json and empty weights."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(8 * 2**20)

    return write


def document(content: object) -> Callable[[Path], None]:
    """Writes YAML: a text as it is, or that of an object."""
    text = content if isinstance(content, str) else yaml.safe_dump(content)

    def write(file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    return write


def shortened(name: str) -> Callable[[Path], None]:
    """Writes an experiment of `configs/bench` with a shorter window."""
    content = yaml.safe_load((ROOT / f"configs/bench/{name}.yaml").read_text(encoding="utf-8"))
    return document({**content, "window": {"warmup_s": 1, "measured_s": 3, "drain_s": 20}})


def decision_log(folder: Path) -> None:
    """Writes the log of 15 s of the simulated traffic under the configuration `MINE`."""
    sections = {key: part for key, part in yaml.safe_load(MINE).items() if key not in ("models", "pool")}
    logged = {**sections, "decision_log": {"dir": str(folder), "sample": 0}}
    simulate(offered(15.0, 20.0, seed=3), replace(machine(0.010), max_running=16), logged)


def lengths(file: Path) -> None:
    lines = [{"prompt": f"Say {n}", "output_tokens": 10 + n % 7, "model": "m"} for n in range(300)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def report(folder: Path) -> None:
    """Runs the small experiment."""
    document(EXPERIMENT)(folder.parent / "an-experiment.yaml")
    assert main(["bench", "run", str(folder.parent / "an-experiment.yaml"), "--out", str(folder)]) == 0


def box(file: Path) -> None:
    """Writes the configuration of a box, and its models."""
    document(BOX)(file)
    for name in (CHAT_MODEL, EMBED_MODEL):
        INPUTS[name](file.parent / name)


def fleet(file: Path) -> None:
    document({"kinds": {"box": {"config": "my-box.yaml", "gpus": 0}}})(file)
    box(file.with_name("my-box.yaml"))


CHAT_MODEL, EMBED_MODEL = "Qwen/Qwen2.5-7B-Instruct", "BAAI/bge-m3"
BOX = {
    "models": {
        "chat": {"model": CHAT_MODEL, "engine": {"max_num_seqs": 16}},
        "embeddings": [{"model": EMBED_MODEL}],
    },
    "pool": {"memory": "1GiB"},
    "classes": yaml.safe_load(MINE)["classes"],
}
LOAD = yaml.safe_load((ROOT / "configs/bench/load.yaml").read_text(encoding="utf-8"))
EXPERIMENT = {
    **LOAD, "systems": [each for each in LOAD["systems"] if each["name"] in ("tandem", "ungated")],
    "loads": [1.0], "seeds": [0], "window": {"warmup_s": 1, "measured_s": 3, "drain_s": 5},
    "capacity": {"rps": 15}, "frontier": {"targets": [0.9], "steps": 0},
}  # fmt: skip
BOUNDS = {"bounds": [{"metric": "rates.reject", "system": "tandem", "load": 1.0, "max": 1.0}]}
INPUTS: Mapping[str, Callable[[Path], None]] = {
    CHAT_MODEL: model({**CHAT, "max_position_embeddings": 8192}),
    EMBED_MODEL: model(ENCODER),
    "configs/workloads/rag.yaml": document((ROOT / "configs/workloads/rag.yaml").read_text(encoding="utf-8")),
    "FILE": box,
    "my-fleet.yaml": fleet,
    # The gateway of docs/fleet.md needs these names.
    "my.yaml": document(f"{MINE}\nserver: {{vllm_metric_names: true}}\n"),
    "my-other.yaml": document(MINE),
    "my-better.yaml": document(MINE.replace("max_waiting: 1 ", "max_waiting: 9 ")),
    **dict.fromkeys(("LOG", "my-log"), decision_log),
    "requests.jsonl": lengths,
    "my-bounds.yaml": document(BOUNDS),
    **dict.fromkeys(("configs/bench/EXPERIMENT.yaml", "EXPERIMENT.yaml"), document(EXPERIMENT)),
    "configs/bench/MY-EXPERIMENT.yaml": document(EXPERIMENT),
    **dict.fromkeys(("DIR", "A", "B", "out/before", "RESULTS"), report),
    **{f"configs/bench/{name}.yaml": shortened(name) for name in ("workflow", "eviction")},
    "data": write_public_data,
    "ops/prometheus": lambda folder: folder.parent.symlink_to(ROOT / "ops"),
    **dict.fromkeys(
        ("ops/helm/tandem", "ops/kubernetes/example"),
        lambda folder: folder.parents[1].symlink_to(ROOT / "ops"),
    ),
}
"""What writes each file or folder that a command reads."""


def write_inputs(words: Sequence[str], folder: Path) -> None:
    """Writes what the words of a command name, unless an earlier command has written it."""
    written = [word for before, word in pairwise(words) if before in ("--out", "--to", "--folder")]
    words = [word.partition("=")[2] or word for word in words]
    named = {*words, *(parent for word in words if (parent := str(Path(word).parent)) != ".")}
    for word in sorted(named & INPUTS.keys() - set(written)):
        if not (folder / word).exists():
            INPUTS[word](folder / word)
