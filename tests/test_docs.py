"""Files, commands, settings, metrics and endpoints that the pages and configurations name exist."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from backends.vllm.plugin.request_metadata import _KNOWN, _PREFIX
from controlplane.cli import _parser
from controlplane.config import Config, load
from controlplane.config.admission_and_scheduling import SchedulingSection
from controlplane.config.renamed_keys import REMOVED, RENAMED
from controlplane.metrics import Metrics
from controlplane.policy.engine.options import EngineOptions
from tests.controlplane.api.scripted_server import staged

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmark_control_plane/README.md",
    ROOT / "ops/README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
CONFIGS = sorted(ROOT.glob("configs/*.yaml"))
OURS = "backends benchmark_control_plane configs controlplane docs kernels ops predictors tests"
FILES = [str(path) for folder in OURS.split() for path in (ROOT / folder).rglob("*.*")]

# A name with capitals or "my" is a placeholder for the reader's own file.
FILE = r"(?<![\w/.*-])(?!my)((?:[a-z0-9_-]+/)*[a-z0-9_-]+\.(?:py|yaml|md))\b"
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
NOTE = re.compile(r"(?<![\d.])\b(00\d\d)\b")
SETTING = rf"(?<![\w./])((?:{'|'.join(one.name for one in fields(Config))})\.[a-z0-9_.\[\]]+)"
METRIC = re.compile(r"\btandem_[a-z_]*[a-z]\b")
ENDPOINT = r"(?<![\w.])(/(?:v1|admin|health|ready|metrics)[\w/]*)"
LEFT_OUT = re.compile(r"^ *# +(?:- )?([a-z0-9_]+):(?: |$)", re.MULTILINE)
PLUGIN = "tandem_shortest_prompt"
INPUTS = ROOT / "benchmark_control_plane/common/command_line.py"
# Names of tenants, and a vLLM argument.
FREE = {"web", "indexer", "kv_cache_dtype"}


def code(page: Path) -> Iterator[str]:
    """Yields each code span and each line of a code block."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", text)


def is_whole(given: Sequence[str]) -> bool:
    """Whether the words after `tandem` are a command with its arguments and not only its name."""
    return len(given) > (2 if given[0] in ("bench", "fleet", "predictor") else 1)


def named(page: Path, pattern: str) -> set[str]:
    return {found for span in code(page) for found in re.findall(pattern, span)}


def source(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def parts(hint: Any) -> Iterator[Any]:
    """Yields the hint and, recursively, the types inside `X | None`, `tuple[X, ...]`, `Mapping[str, X]`."""
    yield hint
    for inner in get_args(hint):
        yield from parts(inner)


def has_setting(section: Any, path: list[str]) -> bool:
    """Whether the path is a setting; every key of a free mapping is, for example of vLLM's arguments."""
    if not path:
        return True
    if section is SchedulingSection and path[0] == "engine":
        return has_setting(EngineOptions, path[1:])
    hint = get_type_hints(section).get(path[0])
    inside = [part for part in parts(hint) if is_dataclass(part)]
    return hint is not None and (not inside or any(has_setting(one, path[1:]) for one in inside))


def keys(section: Any) -> set[str]:
    """Names of all settings of the section and its sub-sections."""
    inside = [part for hint in get_type_hints(section).values() for part in parts(hint) if is_dataclass(part)]
    return {one.name for one in fields(section)}.union(*map(keys, inside))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    text = page.read_text(encoding="utf-8")
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []
    files = {file for file in named(page, FILE) if not any(path.endswith(f"/{file}") for path in FILES)}
    assert files == set()
    assert {module for module in named(page, r"python -m ([\w.]+)") if not source(module).exists()} == set()
    notes = set(NOTE.findall(text))
    assert {note for note in notes if not list(ROOT.glob(f"docs/decisions/{note}-*.md"))} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_are_understood(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert named(page, r"^make ([a-z-]+)") <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for line in code(page):
        if line.startswith("tandem "):
            _, *given = shlex.split(line, comments=True)
            assert not is_whole(given) or _parser().parse_args(given)
        for module, options in re.findall(r"python -m (benchmark_control_plane[\w.]+)([^|;]*)", line):
            known = source(module).read_text(encoding="utf-8") + INPUTS.read_text(encoding="utf-8")
            assert [one for one in re.findall(r"--[a-z-]+", options) if f'"{one}"' not in known] == [], line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_a_page_names_can_be_set(page):
    paths = {path for path in named(page, SETTING) if not path.endswith((".yaml", ".py"))} - {
        *RENAMED,
        *REMOVED,
    }
    assert {path for path in paths if not has_setting(Config, path.replace("[]", "").split("."))} == set()


@pytest.mark.parametrize("page", PAGES + CONFIGS, ids=lambda page: page.name)
def test_metrics_that_a_page_names_are_shown(page):
    shown = set(re.findall(r"^# TYPE (\S+)", Metrics().exposition({}).decode(), re.MULTILINE))
    over_http = {f"{_PREFIX}{key}" for key in _KNOWN}
    assert set(METRIC.findall(page.read_text(encoding="utf-8"))) <= shown | over_http | {PLUGIN}


async def test_endpoints_that_the_pages_name_are_served():
    async with staged() as stage:
        served = [route.path_regex for route in stage.app.routes]
    paths = {path for page in PAGES for path in named(page, ENDPOINT)} - {"/admin"}
    assert "/v1/embeddings" in paths
    assert {path for path in paths if not any(one.fullmatch(path) for one in served)} == set()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda page: page.name)
def test_configurations_to_start_from_are_valid_and_so_is_what_they_leave_out(config):
    load(config)
    left_out = set(LEFT_OUT.findall(config.read_text(encoding="utf-8")))
    assert left_out and left_out <= keys(Config) | {one.name for one in fields(EngineOptions)} | FREE
