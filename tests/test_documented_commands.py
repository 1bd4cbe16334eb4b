"""Each shell command of the documentation is run as printed, by a test or by CI itself, or says why not.

A command is a line of a shell block, or a code span that has arguments. What it reads is written under the
name that the page has. Only workloads are reduced, by the options that are appended to the command.
The arguments of a Python or `tandem` command that is not run are parsed by its own parser.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping
from functools import partial, reduce
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NoReturn

import pytest

from controlplane.cli import main
from tests import programs
from tests.command_inputs import write_inputs
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
    r"(ops/README|docs/fleet).md helm .*": "",
    r"ops/README.md kubectl .*": "",
    r"\S+ python -m benchmark_control_plane\.simulator\.queueing_check": "--customers 400",
    r"\S+ python -m benchmark_control_plane\.round_model\.scheduling_cost": "--requests 50 --steps 3",
    _EXPERIMENT + r"collocation\.simulated_embed_many.*": "--texts 64 --seeds 0 --fixed 1",
    _EXPERIMENT + r"engine\.frontier": "--data data --policies tandem --requests 30 --warm-up 0 --start 8",
    _EXPERIMENT + r"engine\.plugin_cost": "--running 8 --waiting 8 --steps 5 --settling 5 --orderings srmt",
    _EXPERIMENT + r"engine\.starvation": "--steps 400",
    _EXPERIMENT + r"fleet\.report_cost": "--calls 10",
    _EXPERIMENT + r"gate\.decision_log_throughput": "--rounds 2 --seconds 0.5 --tokens 2",
    _EXPERIMENT + r"gate\.http_overhead": "--decision-only",
    _EXPERIMENT + r"gate\.live_feed_cost": "--windows 1 --seconds 1",
    _EXPERIMENT + r"gate\.memory_probe_cost": "--seconds 0.05 --rounds 1",
    _EXPERIMENT + r"gate\.new_connections": "--rates 50 --seconds 0.5",
    _EXPERIMENT + r"gate\.observation_cost.*": "--requests 5 --rounds 1",
    _EXPERIMENT + r"gate\.prediction_coverage": "--requests 60 --rates 4 --seeds 3",
    _EXPERIMENT + r"gate\.rejections .*": "--seeds 0",
    _EXPERIMENT + r"gate\.retry_after_accuracy": "--rates 8 --seeds 1",
    _EXPERIMENT + r"gate\.victims .*": '--seeds 0 --arms srmt "gate: random"',
    _EXPERIMENT + r"gate\.virtual_day.*": "--hours 3 --settling 1 --rate 0.05",
    _EXPERIMENT + r"gate\.workflow_oracles .*": (
        '--arms "by work" "shares 5 10 85, reserve: time" --seeds 0 --loads 0.5'
    ),
    _EXPERIMENT + r"hidden_cache\.attainment": "--data data --requests 5",
    _EXPERIMENT + r"hidden_cache\.decode_cost": "",
    _EXPERIMENT + r"prediction\.embedding_forecast": "--data data",
    _EXPERIMENT + r"prediction\.goodput": "--data data --requests 5 --warm-up 1 --rates 9 --seeds 1",
    _EXPERIMENT + r"prediction\.output_length": "--data data --only conditional",
    _EXPERIMENT + r"prediction\.train_prior": "--data data --to prior.json",
}
"""Commands that are run here, by a pattern of page and command, and options that reduce their workload."""

_ON_VLLM = re.compile(r"python -m \S+\.(engine\.\w+|hidden_cache\.attainment|prediction\.goodput)")
"""Experiments on vLLM's scheduler, without a model."""
OFFLINE: Mapping[str, str] = {
    "helm install": "helm template",
    "kubectl apply -k": "kubectl kustomize",
}
"""Commands that need a cluster, and the part of each that needs none: it reads the same files and options."""

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
    _EXPERIMENT + r"gate\.live_feed_cost .*": (
        "tests/test_documented_commands.py::test_an_experiment_runs_with_less_work"
    ),
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

IN_CI: Mapping[str, tuple[str, str]] = {
    r"\S+ make test": (".ci/run", "exec make test"),
    r"\S+ make setup": ("Makefile", "\ntest: setup"),
    r"\S+ make test-fast": ("Makefile", "\n\t$(MAKE) test-fast"),
    r"\S+ make lint": ("Makefile", "\n\t$(MAKE) -j 2 -O lint kernels"),
    _EXPERIMENT + r"hidden_cache\.kernel_figures --check": ("Makefile", "kernel_figures --check"),
}
"""Commands that `.ci/run` runs beside the tests, by `make test`: a file, and the text in it that runs them.

`make test` installs what `make setup` does, and its part `make kernels` checks the figures of the kernels.
"""

_MINUTES = "takes minutes; its arguments are parsed"
_REAL = "measures real engines, for minutes; its arguments are parsed"
NOT_RUN: Mapping[str, str] = {
    r"ops/README.md make setup .+": "writes to /opt; ops/image/cpu.Dockerfile has it as a step",
    r"\S+ make serve": "serves until it is stopped; test_clients_on_engines serves its configuration",
    r"\S+ (pip|python3 -m venv|npm) (?!.*plugin_example).*": "needs a network: installs packages",
    r"docs/clients.md make clients": "needs a network: installs packages",
    r"\S+ make fuzz": "takes too long: the property tests that CI runs, with fifty times as many examples",
    r"SECURITY.md make faults": "takes an hour: every fault three times; test_run_faults injects some",
    r"docs/gpu.md make test-gpu .*": "needs a GPU",
    r"\S+ make gpu-evidence( .*)?": "needs a GPU; test_gpu_evidence checks that its steps can start",
    r"docs/gpu.md make gpu-rehearsal": "takes 10 minutes; test_gpu_evidence checks that its steps can start",
    r"docs/gpu.md tandem .*": "needs a GPU, and models from a network",
    _EXPERIMENT
    + r"(client_accuracy\.|gpu_evidence\.|collocation\.simulated_mix|gate\.tuning_gain).*": _MINUTES,
    _EXPERIMENT + r"hidden_cache\.kernel_figures": "writes what CI compares, see its --check",
    _EXPERIMENT + r"collocation\.(interference|embed_many|embedding_throughput).*": _REAL,
    _EXPERIMENT + r"(faults\.soak|fleet\.ray_overhead .*|prediction\.ttft_forecast)": _REAL,
    _EXPERIMENT + r"gate\.(cancellation|hostile_input|overload)": _REAL,
    _EXPERIMENT + r"gate\.(off_policy|tuning_on_engines) .*": _REAL,
    _EXPERIMENT
    + r"gate\.operator_tasks": "takes minutes, and writes images; test_operator_tasks runs the page",
    r"ops/README.md docker .*": "needs a Docker daemon; tests/ops/test_tools checks the files that it reads",
    r"ops/README.md debootstrap .*": "needs root and a network",
    r"ops/README.md python ops/image/run_steps.py .*": "needs root and a network",
    r"ops/README.md (cp|systemctl) .*": "needs root and systemd; tests/ops/test_tools verifies the unit",
    r"docs/fleet.md kubectl .*": "needs a cluster",
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
    entries = (*HERE, *ELSEWHERE, *IN_CI, *NOT_RUN)
    found = {each: matching(entries, *each) for each in ALL}
    assert {each: patterns for each, patterns in found.items() if len(patterns) != 1} == {}
    assert sorted(entries) == sorted({pattern for (pattern,) in found.values()})
    assert len(ALL) > 150


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_run_commands_are_there(test):
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


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


def test_continuous_integration_runs_what_the_table_says():
    assert {
        command for command, (file, text) in IN_CI.items()
        if text not in (ROOT / file).read_text(encoding="utf-8")
    } == set()  # fmt: skip


@pytest.mark.long
@pytest.mark.usefixtures("entry_points")
@pytest.mark.parametrize("page", [page for page, found in RUN.items() if found])
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    """In the order of the page, in one folder; only `diff` ends with 1, because it finds a difference."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADMIN_KEY", "root")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    absent = []
    for command in RUN[page]:
        words = shlex.split(command)
        write_inputs(words, tmp_path)
        capsys.readouterr()
        if words[0] == "tandem":
            [pattern] = matching(HERE, page, command)
            assert main([*words[1:], *HERE[pattern].split()]) == (words[1] == "diff"), command
            assert capsys.readouterr().out, command
        elif words[0] in programs.SOURCES and programs.found(words[0]) is None:
            absent.append(words[0])
        else:
            alone = reduce(lambda text, pair: text.replace(*pair), OFFLINE.items(), command)
            done = subprocess.run(["bash", "-ec", alone], capture_output=True, text=True, check=False)
            assert done.returncode == 0 and done.stdout, f"{command}: {done.stderr}"
            # Helm notes each link in a chart.
            assert not done.stderr or words[0] == "helm", command
    for program in absent:
        programs.required(program)


@pytest.mark.long
@pytest.mark.parametrize("command", sorted(each for each in EXPERIMENTS if not _ON_VLLM.match(each)))
def test_an_experiment_runs_with_less_work(command, tmp_path):
    words = [*shlex.split(command)[1:], *shlex.split(EXPERIMENTS[command])]
    write_inputs(words, tmp_path)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.engine
@pytest.mark.untimed
@pytest.mark.parametrize("command", sorted(filter(_ON_VLLM.match, EXPERIMENTS)))
def test_an_experiment_on_vllms_scheduler_runs_with_less_work(command, tmp_path, monkeypatch, capsys):
    """In this process, because each of them would import vLLM for longer than it runs."""
    module, *words = [*shlex.split(command)[2:], *shlex.split(EXPERIMENTS[command])]
    write_inputs(words, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert import_module(module).main(words) == 0
    assert capsys.readouterr().out


def test_variables_of_documented_make_commands_are_in_the_makefile():
    given = {name for _, each in ALL if each.startswith("make ") for name in re.findall(r" ([A-Z_]+)=", each)}
    assert given == {"EDITABLE", "EXTRAS", "PYTHON", "VENV"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert given <= set(re.findall(r"^([A-Z_]+) [?:]=", makefile, re.MULTILINE))


class Parsed(Exception):
    """The arguments were accepted."""


UNRUN = sorted(
    {
        each
        for page, each in ALL
        if (each.startswith(("python ", "tandem ")) and matching(NOT_RUN, page, each))
        or (each.startswith("python ") and " --" in each and matching(ELSEWHERE, page, each))
    }
)
"""Those that are not run, and those that another test runs with arguments of its own."""


@pytest.mark.long
@pytest.mark.usefixtures("entry_points")
@pytest.mark.parametrize("command", UNRUN)
def test_the_arguments_of_a_command_that_is_not_run_are_accepted(command, monkeypatch):
    """Up to the parser: an option that was renamed, or a value that it refuses, ends the command before."""
    parse = ArgumentParser.parse_args

    def parse_alone(*given: Any) -> NoReturn:
        raise Parsed(parse(*given))

    program, *words = shlex.split(command)
    if program == "tandem":
        run = main
    elif words[0] == "-m":
        run = import_module(words.pop(1)).main
    else:
        run = partial(runpy.run_path, str(ROOT / words[0]), run_name="__main__")
    monkeypatch.setattr("sys.argv", [program, *words] if program == "tandem" else words)
    monkeypatch.setattr("argparse.ArgumentParser.parse_args", parse_alone)
    with pytest.raises(Parsed):
        run()
