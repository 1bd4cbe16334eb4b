"""Each shell command of the documentation is run as printed, here or by another test, or says why not.

A command is a line of a shell block, or a code span that has arguments. What it reads is written under the
name that the page has. Only workloads are reduced, by the options that are appended to the command.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from benchmark_control_plane.experiments.gate.tuning_gain import machine, offered
from benchmark_control_plane.simulator.simulation import simulate
from controlplane.cli import main
from tests import programs
from tests.benchmark_control_plane.capacity.test_capacity_command import CHAT, ENCODER
from tests.benchmark_control_plane.tuning.test_tune_command import MINE
from tests.test_docs import PAGES, ROOT, is_whole

_EXPERIMENT = r"\S+ python -m benchmark_control_plane\.experiments\."
HERE: Mapping[str, str] = {
    r"(README|docs/first-day-on-a-gpu).md tandem (init .*|check my.yaml)": "",
    r"docs/configuration.md tandem check FILE": "",
    r"docs/first-day-on-a-gpu.md tandem capacity .*": "--requests 100 --steps 0",
    r"docs/operator-guide.md tandem predictor .*": "--max-examples 200",
    r"docs/operator-guide.md printf .*": "",
    r"docs/fleet.md tandem fleet plan .*": "--requests 60 --steps 0",
    r"\S+ tandem bench (?!.*(-gpu|/fleet-[\w-]+).yaml).*": "",
    r"\S+ tandem replay LOG.*": "",
    r"docs/tuning.md tandem diff .*": "",
    r"ops/README.md promtool .*": "",
    r"\S+ python -m benchmark_control_plane\.simulator\.queueing_check": "--customers 400",
    _EXPERIMENT + r"collocation\.simulated_embed_many.*": "--texts 64 --seeds 0 --fixed 1",
    _EXPERIMENT + r"fleet\.report_cost": "--calls 10",
    _EXPERIMENT + r"gate\.http_overhead": "--decision-only",
    _EXPERIMENT + r"gate\.memory_probe_cost": "--seconds 0.05 --rounds 1",
    _EXPERIMENT + r"gate\.observation_cost.*": "--requests 5 --rounds 1",
    _EXPERIMENT + r"gate\.prediction_coverage": "--requests 60 --rates 4 --seeds 3",
    _EXPERIMENT + r"gate\.rejections .*": "--seeds 0",
    _EXPERIMENT + r"gate\.retry_after_accuracy": "--rates 8 --seeds 1",
    _EXPERIMENT + r"hidden_cache\.decode_cost": "",
}
"""Commands that are run here, by a pattern of page and command, and options that reduce their workload."""

_API, _COMMANDS = "tests/controlplane/api", "tests/controlplane/commands"
_BENCH, _FLEET = "tests/benchmark_control_plane", "tests/controlplane/fleet_on_ray"
ELSEWHERE: Mapping[str, str] = {
    r"docs/operator-tasks.md (tandem|curl|export) .*": (
        f"{_API}/operations/test_operator_tasks.py::test_the_commands_of_the_page_answer_the_ten_tasks"
    ),
    r"(README|docs/(api|embeddings|first-day-on-a-gpu|fleet|operator-guide)).md curl .*": (
        f"{_API}/test_readme_examples.py::test_curl_requests_succeed"
    ),
    r"docs/operator-guide.md (export|tandem (diff|apply|rollback)) .*": (
        f"{_COMMANDS}/test_config_changes.py::test_the_commands_of_the_operator_guide_run"
    ),
    r"docs/tuning.md tandem apply .*": (
        f"{_COMMANDS}/test_config_changes.py::test_a_guarded_change_is_followed_to_its_end"
    ),
    r"\S+ tandem bench run configs/bench/fleet-.*": (
        f"{_BENCH}/fleet_studies/test_run_study.py::test_a_committed_study_runs_reduced"
    ),
    r"\S+ tandem tune LOG.*": (
        f"{_BENCH}/tuning/test_tune_command.py::test_a_better_file_is_written_and_the_run_resumes"
    ),
    r"\S+ tandem top --server URL": f"{_COMMANDS}/test_top.py::test_the_application_shows_what_the_feed_has",
    r"\S+ tandem top --server URL --once": (
        f"{_COMMANDS}/test_top.py::test_once_prints_classes_memory_and_what_went_wrong"
    ),
    r"docs/(first-day-on-a-gpu|operator-guide).md tandem explain .*": (
        f"{_COMMANDS}/test_request_explanation.py::test_a_preemption_and_a_rejection_are_explained"
    ),
    r"\S+ tandem completion bash": f"{_COMMANDS}/test_commands.py::test_bash_completes_words",
    r"(README|docs/first-day-on-a-gpu).md tandem serve my.yaml": (
        "tests/test_quick_start.py::test_the_readme_answers_from_the_documentation"
    ),
    r"docs/operator-guide.md tandem serve my.yaml --watch": (
        f"{_API}/test_config_reload.py::test_content_is_applied_once_two_reads_agree"
    ),
    r"docs/writing-a-policy.md (pip install|tandem (check|serve)) .*": (
        "tests/test_wheel.py::test_a_plug_in_is_installed_and_served"
    ),
    r"docs/operator-guide.md vllm serve .*": (
        "tests/backends/vllm/test_serve_command.py"
        "::test_vllms_own_server_runs_tandems_scheduler_with_its_metadata"
    ),
    r"docs/clients.md five/bin/lm_eval .*": (
        "tests/clients/test_lm_eval.py::test_log_likelihoods_are_those_of_transformers"
    ),
    r"docs/fleet.md tandem fleet serve .*": f"{_FLEET}/test_fleet_reload.py::test_a_class_changes_in_place",
    r"docs/fleet.md export .*": f"{_FLEET}/test_fleet_page.py::test_the_page_has_the_environment_of_a_node",
    r"\S+ python -m benchmark_control_plane.replay.*": (
        f"{_BENCH}/test_replay_command.py::test_prints_the_schedule"
    ),
    r"\S+ python -m benchmark_control_plane.hybrid .*": (
        f"{_BENCH}/test_hybrid_command.py::test_prints_the_plan"
    ),
    r"\S+ python -m benchmark_control_plane.optimum .*": (
        f"{_BENCH}/round_model/test_optimum.py::test_command"
    ),
    r"\S+ python -m benchmark_control_plane.reproduce .*": (
        f"{_BENCH}/test_reproduce.py::test_table_ranks_the_policies_as_published"
    ),
    _EXPERIMENT + r"faults\.run_faults": (
        f"{_BENCH}/experiments/faults/test_run_faults.py::test_some_faults_of_clients"
    ),
    r"\S+ python -m controlplane.config.reference_pages": (
        "tests/test_reference_pages.py::test_the_committed_page_is_what_the_code_says"
    ),
    r"\S+ python -m controlplane.commands.reference_page": (
        f"{_COMMANDS}/test_commands.py::test_page_agrees_with_the_parser"
    ),
    r"\S+ python ops/grafana/generate.py": (
        "tests/ops/test_tools.py::test_the_committed_dashboard_is_what_the_generator_writes"
    ),
    r"\S+ python ops/kubernetes/render.py": (
        "tests/ops/test_tools.py::test_the_chart_and_the_kustomize_base_are_the_same_objects"
    ),
    r"\S+ python -m benchmark_control_plane.experiments.results_page.write_pages": (
        f"{_BENCH}/experiments/results_page/test_write_pages.py::test_written_pages_match_the_committed_results"
    ),
}
"""Tests that run the commands, or compare what they write, by a pattern of page and command."""

_MINUTES = "takes minutes; test_docs checks the options"
_REAL = "measures real engines, for minutes; test_docs checks the options"
_DATA = "needs public data; test_docs checks the options"
NOT_RUN: Mapping[str, str] = {
    r"\S+ make (setup|serve)( .*)?": "needs a network: installs 4 GB",
    r"\S+ (pip|python3 -m venv|npm) (?!.*plugin_example).*": "needs a network: installs packages",
    r"docs/clients.md make clients": "needs a network: installs packages",
    r"\S+ make (test|test-fast|lint|fuzz|faults)": "takes longer than a minute",
    r"\S+ make (test-gpu|gpu-evidence|gpu-rehearsal)( .*)?": "needs a GPU, or takes longer than a minute",
    r"docs/gpu.md tandem .*": "needs a GPU, and models from a network",
    r"\S+ python -m benchmark_control_plane\.round_model\.scheduling_cost": "takes longer than a minute",
    _EXPERIMENT + r"(client_accuracy|engine|gpu_evidence|hidden_cache)\.(?!decode_cost).*": _MINUTES,
    _EXPERIMENT + r"collocation\.(interference|embed_many|embedding_throughput).*": _REAL,
    _EXPERIMENT + r"(collocation\.simulated_mix|prediction\.(?!ttft_forecast).*)": _DATA,
    _EXPERIMENT + r"(faults\.soak|fleet\.ray_overhead .*|prediction\.ttft_forecast)": _REAL,
    _EXPERIMENT + r"gate\.(cancellation|hostile_input|overload)": _REAL,
    _EXPERIMENT + r"gate\.(decision_log_throughput|(off_policy|tuning_on_engines) .*)": _REAL,
    _EXPERIMENT + r"gate\.(live_feed_cost.*|new_connections|operator_tasks)": _MINUTES,
    _EXPERIMENT + r"gate\.(tuning_gain|victims|workflow_oracles) .*": _MINUTES,
    r"ops/README.md docker .*": "needs docker",
    r"ops/README.md debootstrap .*": "needs root and a network",
    r"ops/README.md python ops/image/run_steps.py .*": "needs root and a network",
    r"ops/README.md (cp|systemctl) .*": "needs root",
    r"(ops/README|docs/fleet).md (helm|kubectl) .*": "needs a cluster",
}
"""Reasons why commands are not run, by a pattern of page and command."""

_SPAN = re.compile(r"`((?:tandem|python|make) [^`\n]+)`")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"(?:^|\s+)#\s.*$", re.MULTILINE)


def commands() -> Iterator[tuple[str, str]]:
    """Yields the page, relative to the root, and each command on one line without its comment, in order."""
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        if name.startswith("docs/decisions/"):
            continue
        text, end = page.read_text(encoding="utf-8"), 0
        for block in _BLOCK.finditer(text):
            yield from ((name, span) for span in _spans(text[end : block.start()]))
            if block[1] == "sh":
                lines = _COMMENT.sub("", re.sub(r"\\\n *", "", block[2])).splitlines()
                yield from ((name, line) for line in lines if line)
            end = block.end()
        yield from ((name, span) for span in _spans(text[end:]))


def _spans(text: str) -> Iterator[str]:
    for span in _SPAN.findall(text):
        if not span.startswith("tandem ") or is_whole(shlex.split(span)[1:]):
            yield span


ALL = list(dict.fromkeys(commands()))


def matching(table: Iterable[str], page: str, command: str) -> list[str]:
    return [pattern for pattern in table if re.fullmatch(pattern, f"{page} {command}")]


def test_each_command_is_run_or_has_a_reason_and_no_entry_is_stale():
    entries = (*HERE, *ELSEWHERE, *NOT_RUN)
    found = {each: matching(entries, *each) for each in ALL}
    assert {each: patterns for each, patterns in found.items() if len(patterns) != 1} == {}
    assert sorted(entries) == sorted({pattern for (pattern,) in found.values()})
    assert len(ALL) > 150


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_run_commands_are_there(test):
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


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
    **dict.fromkeys(("my.yaml", "my-other.yaml"), document(MINE)),
    "my-better.yaml": document(MINE.replace("max_waiting: 1 ", "max_waiting: 9 ")),
    **dict.fromkeys(("LOG", "my-log"), decision_log),
    "requests.jsonl": lengths,
    "my-bounds.yaml": document(BOUNDS),
    **dict.fromkeys(("configs/bench/EXPERIMENT.yaml", "EXPERIMENT.yaml"), document(EXPERIMENT)),
    "configs/bench/MY-EXPERIMENT.yaml": document(EXPERIMENT),
    **dict.fromkeys(("DIR", "A", "B", "out/before", "RESULTS"), report),
    "ops/prometheus": lambda folder: folder.parent.symlink_to(ROOT / "ops"),
}
"""What writes each file or folder that a command reads."""


def write_inputs(words: Sequence[str], folder: Path) -> None:
    """Writes what the words of a command name, unless an earlier command has written it."""
    written = [word for before, word in pairwise(words) if before in ("--out", "--to")]
    named = {*words, *(parent for word in words if (parent := str(Path(word).parent)) != ".")}
    for word in sorted(named & INPUTS.keys() - set(written)):
        if not (folder / word).exists():
            INPUTS[word](folder / word)


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this tree, whatever is installed."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    entries = {
        group: [EntryPoint(*each, group) for each in named.items()] for group, named in declared.items()
    }
    monkeypatch.setattr("controlplane.cli.entry_points", lambda *, group: entries[group])


RUN = {
    page: [each for at, each in ALL if at == page and matching(HERE, page, each) and "python -m" not in each]
    for page, _ in ALL
}
EXPERIMENTS = {
    each: HERE[pattern]
    for page, each in ALL
    if each.startswith("python -m")
    for pattern in matching(HERE, page, each)
}


@pytest.mark.long
@pytest.mark.usefixtures("entry_points")
@pytest.mark.parametrize("page", [page for page, found in RUN.items() if found])
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    """In the order of the page, in one folder; only `diff` ends with 1, because it finds a difference."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADMIN_KEY", "root")
    for command in RUN[page]:
        words = shlex.split(command)
        write_inputs(words, tmp_path)
        capsys.readouterr()
        if words[0] == "tandem":
            [pattern] = matching(HERE, page, command)
            assert main([*words[1:], *HERE[pattern].split()]) == (words[1] == "diff"), command
            assert capsys.readouterr().out, command
        elif words[0] in programs.SOURCES and programs.found(words[0]) is None:
            pytest.skip(f"{words[0]} is not installed: {programs.SOURCES[words[0]]}")
        else:
            done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "") and done.stdout, command


@pytest.mark.long
@pytest.mark.parametrize("command", sorted(EXPERIMENTS))
def test_an_experiment_runs_with_less_work(command, tmp_path):
    words = [*shlex.split(command)[1:], *EXPERIMENTS[command].split()]
    write_inputs(words, tmp_path)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout, done.stderr
