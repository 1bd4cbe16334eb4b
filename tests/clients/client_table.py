"""Runs every client's probes against one real server and writes the table of docs/clients.md.

The server is that of configs/dev.yaml: vLLM with a tiny Llama, MiniLM and a tiny reranker. Each client runs
in a process of its own, with the Python that has its packages: this one, or one of `--python`; Node's clients
in the folder `--node`, whose node_modules has theirs. A row is written only for a client that ran; the others
are listed as not run.

    python -m tests.clients.client_table [--python PATH ...] [--node FOLDER] [--only NAME ...]
        [--results FILE] [--write]

Exit status 1 if a cell fails. With `--results` the rows are kept in a file, and a client whose row is there
without a failure is not run again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmark_control_plane.common.results_file import add_results, read_previous, write_atomic, write_json
from benchmark_control_plane.common.servers import interrupt_on_sigterm, serving, tandem_server
from tests.clients.recipes import PAGE, SHOWN_URL, recipes

ROOT = Path(__file__).resolve().parents[2]
PROBES = Path(__file__).with_name("probes")
MARKS = ("<!-- table: begin -->", "<!-- table: end -->")
WORKS, FAILS, NO_CALL = "works", "FAILS", "—"
FEATURES = (
    "chat", "stream", "tools", "structured output", "responses", "embeddings", "rerank", "tokens", "models",
    "errors", "images", "recipe",
)  # fmt: skip
_SECONDS = 120.0
_VERSIONS = "import importlib.metadata as m, sys; print(' '.join(map(m.version, sys.argv[1:])))"


@dataclass(frozen=True, slots=True)
class Client:
    """A client, the file with its probes, and the packages that they import; the first gives the version.

    `ci_tests` is a file with tests of the client on scripted engines, which continuous integration runs; only
    for clients that the extra `dev` installs.
    """

    name: str
    probes: str
    packages: tuple[str, ...] = ()
    ci_tests: str = ""


_LLAMA_INDEX = (
    "llama-index-core",
    "llama-index-llms-openai-like",
    "llama-index-embeddings-openai-like",
    "llama-index-postprocessor-cohere-rerank",
)
_API = "tests/controlplane/api"
CLIENTS = (
    Client("openai (Python)", "openai_python.py", ("openai",), f"{_API}/openai/test_openai_client.py"),
    Client("openai (Node)", "openai_node.mjs", ("openai",)),
    Client("anthropic (Python)", "anthropic_python.py", ("anthropic",), f"{_API}/test_anthropic.py"),
    Client("@anthropic-ai/sdk (Node)", "anthropic_node.mjs", ("@anthropic-ai/sdk",)),
    Client("cohere ClientV2 (Python)", "cohere_python.py", ("cohere",), f"{_API}/test_cohere.py"),
    Client("cohere-ai ClientV2 (Node)", "cohere_node.mjs", ("cohere-ai",)),
    Client(
        "Vercel AI SDK (Node)",
        "vercel_ai_node.mjs",
        ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/cohere"),
    ),
    Client("LangChain", "langchain_python.py", ("langchain-openai",), f"{_API}/test_tool_clients.py"),
    Client("LangChain's CohereRerank", "langchain_cohere_python.py", ("langchain-cohere",)),
    Client("LlamaIndex", "llama_index_python.py", _LLAMA_INDEX),
    Client("Haystack", "haystack_python.py", ("haystack-ai", "cohere-haystack")),
    Client("LiteLLM", "litellm_python.py", ("litellm",)),
    Client(
        "openai-agents",
        "openai_agents_python.py",
        ("openai-agents",),
        f"{_API}/openai/test_responses_clients.py",
    ),
    Client("pydantic-ai", "pydantic_ai_python.py", ("pydantic-ai-slim",), f"{_API}/test_tool_clients.py"),
    Client("instructor", "instructor_python.py", ("instructor",)),
    Client("Tandem's client", "tandem_python.py", ("tandem-llm",), "tests/controlplane/sdk/test_clients.py"),
    Client("curl", "curl_command.py"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Outcome of one client: the version and a cell for each feature that it has."""

    client: Client
    version: str
    cells: Mapping[str, str]
    failures: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def probed_server() -> Iterator[str]:
    """The URL of a server of configs/dev.yaml, whose embedding worker does not wait for idle cores."""
    config = yaml.safe_load((ROOT / "configs/dev.yaml").read_text(encoding="utf-8"))
    for model in (*config["models"]["embeddings"], *config["models"]["rerankers"]):
        model["idle_cpu_priority"] = False
    with tempfile.TemporaryDirectory() as folder:
        server = tandem_server(config, Path(folder) / "dev.yaml")
        with serving(server, Path(folder) / "log") as running:
            yield running.url


def row_of(client: Client, url: str, pythons: Sequence[str], node: Path | None) -> Row | None:
    """Runs the probes of one client; None if its packages are not installed."""
    if client.probes.endswith(".mjs"):
        return None if node is None else _node_row(client, url, node)
    for python in pythons if client.packages else pythons[:1]:
        version = _curl_version() if not client.packages else _version(python, client.packages)
        if version is not None:
            found = _run([python, str(PROBES / client.probes), url], python=python)
            if client.name in recipes():
                _add_recipe(client, url, python, found)
            return Row(client, version, found["cells"], found["failures"])
    return None


def _add_recipe(client: Client, url: str, python: str, found: dict[str, Any]) -> None:
    """Runs the client's program of the page."""
    program = recipes()[client.name].replace(SHOWN_URL, url) + "\nassert answer\n"
    ran = subprocess.run(
        [python, "-c", program],
        capture_output=True, text=True, env=environment_of(python), timeout=_SECONDS, check=False,
    )  # fmt: skip
    found["cells"]["recipe"] = FAILS if ran.returncode else WORKS
    if ran.returncode:
        found["failures"]["recipe"] = ran.stderr[-1500:]


def _node_row(client: Client, url: str, node: Path) -> Row | None:
    packages = [node / "node_modules" / name / "package.json" for name in client.packages]
    if shutil.which("node") is None or not all(file.is_file() for file in packages):
        return None
    version = json.loads(packages[0].read_text(encoding="utf-8"))["version"]
    # Node looks for packages beside the importing file.
    with tempfile.TemporaryDirectory(dir=node) as folder:
        for name in ("probe.mjs", client.probes):
            shutil.copy(PROBES / name, folder)
        found = _run(["node", str(Path(folder) / client.probes), url])
    return Row(client, version, found["cells"], found["failures"])


def _version(python: str, packages: Sequence[str]) -> str | None:
    """Version of the first package; None unless all are installed for this Python."""
    asked = subprocess.run(
        [python, "-c", _VERSIONS, *packages],
        capture_output=True,
        text=True,
        env=environment_of(python),
        check=False,
    )
    return None if asked.returncode else asked.stdout.split()[0]


def _curl_version() -> str | None:
    if shutil.which("curl") is None:
        return None
    asked = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True)
    return asked.stdout.split()[1]


def _run(command: Sequence[str], python: str = sys.executable) -> dict[str, Any]:
    """The JSON of the last line that the probes print. Raises RuntimeError if they print none."""
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment_of(python), timeout=_SECONDS, check=False
    )
    try:
        found: dict[str, Any] = json.loads(ran.stdout.strip().rpartition("\n")[2])
    except ValueError:
        raise RuntimeError(f"{command[1]} printed no result: {ran.stderr[-2000:]}") from None
    return found


def environment_of(python: str) -> dict[str, str]:
    """This environment; for another Python without the paths of this one. Nothing is fetched or reported."""
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    kept = {
        name: value for name, value in os.environ.items() if python == sys.executable or name != "PYTHONPATH"
    }
    return kept | quiet


def table_of(rows: Sequence[Row]) -> str:
    """The Markdown table of the rows and the list of the clients that did not run."""
    columns = ("client", "version", *FEATURES, "CI")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [_shown(row.cells.get(feature, NO_CALL)) for feature in FEATURES]
        in_ci = "yes" if row.client.ci_tests else NO_CALL
        lines.append(f"| {' | '.join([row.client.name, row.version, *cells, in_ci])} |")
    ran = {row.client.name for row in rows}
    missing = [client.name for client in CLIENTS if client.name not in ran]
    lines += ["", f"Not run, because not installed: {', '.join(missing) or 'none'}."]
    return "\n".join(lines)


def _shown(cell: str) -> str:
    return cell if cell in (WORKS, FAILS, NO_CALL) else f"`{cell}`"


def with_table(page: str, table: str) -> str:
    """The page with its table replaced. Raises ValueError if the marks are missing."""
    before, begin, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (begin and end):
        raise ValueError(f"the page lacks the lines {MARKS[0]} and {MARKS[1]}; add them")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="*", default=[], metavar="PATH")
    parser.add_argument("--node", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="part of a client's name")
    add_results(parser)
    parser.add_argument("--write", action="store_true", help="write docs/clients.md")
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    known = read_previous(options.results)
    missing = [one for one in CLIENTS if one.name not in known or known[one.name]["failures"]]
    chosen = [one for one in missing if not options.only or any(part in one.name for part in options.only)]
    with probed_server() if chosen else nullcontext("") as url:
        for client in chosen:
            row = row_of(client, url, [sys.executable, *options.python], options.node)
            if row is None:
                sys.stdout.write(f"{client.name}: not installed\n")
                continue
            sys.stdout.write(f"{client.name}: {dict(row.cells)}\n")
            sys.stderr.writelines(f"{failure}\n" for failure in row.failures.values())
            known[client.name] = {
                "version": row.version,
                "cells": dict(row.cells),
                "failures": dict(row.failures),
            }
            if options.results is not None:
                write_json(options.results, known)
    rows = [Row(client, **known[client.name]) for client in CLIENTS if client.name in known]
    if options.write:
        write_atomic(PAGE, with_table(PAGE.read_text(encoding="utf-8"), table_of(rows)))
    return int(any(row.failures for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
