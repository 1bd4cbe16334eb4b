"""Tries the ten tasks of docs/operator-tasks.md by page, terminal and API, and writes their times and images.

    python -m benchmark_control_plane.experiments.gate.operator_tasks [--warmup 280]

Runs every command of the page once, and the page's steps in Chromium, on three simulated servers under load.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmark_control_plane.common.servers import Server, all_serving
from benchmark_control_plane.experiments.faults.simulated_server import DEATH_SIGNAL
from benchmark_control_plane.experiments.gate.operator_pages import PAGES, browser, overview, terminal, tried
from benchmark_control_plane.experiments.gate.operator_servers import (
    ADMIN_KEY,
    GATE,
    QUOTAS,
    STATIC,
    loaded,
    server,
)

DOCS = Path(__file__).resolve().parents[3] / "docs"
_PAGE = DOCS / "operator-tasks.md"
_BEGIN, _END = "do not edit. -->\n", "<!-- end -->"
_ADDRESS = "http://127.0.0.1:8000"
_SERVERS = {"1": GATE, "3, with static quotas": STATIC, "5": GATE, "7": GATE}
# Before their pages, which change the same keys once more.
_CHANGES, _DRAIN = ("3", "3, with static quotas"), "10"
_GUARD_S = 20
_TABLE = """
Each command and page ran once on three simulated servers under load. The two cores of the machine had a load
of {load}, so the times are upper bounds; the time to read is not in them. That of a page is from its address
to the answer in Chromium, with the clicks. The guard of task 8 lasted {guard} s instead of 5 min at the
terminal; the page applied the change and undid it. Tasks 1, 5 and 7 ran where the gate preempts and
rejects, as did the drain by the page, one part of task 3 where quotas are static, the others where they move.

| task | page, s | terminal, s | API, s |
|---|---|---|---|
{rows}
"""
_SETTLE_S = 45.0


@dataclass(frozen=True, slots=True)
class Ran:
    """One command: whether it is `tandem`, and its seconds."""

    is_terminal: bool
    seconds: float


def commands_by_task(text: str) -> dict[str, list[str]]:
    """The commands of each task of the page by its number, which the title of a further part follows."""
    found: dict[str, list[str]] = {}
    number: re.Match[str] | None = None
    for mark, title, body in re.findall(r"^(###?) (.*)\n((?:(?!###? ).*\n)*)", text, re.MULTILINE):
        if mark == "##":
            number = re.match(r"\d+(?=\. )", title)
        if number is not None:
            blocks = "".join(re.findall(r"^```sh\n(.*?)^```", body, re.DOTALL | re.MULTILINE))
            found[number[0] if mark == "##" else f"{number[0]}, {title.lower()}"] = blocks.splitlines()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warmup", type=float, default=280.0, help="seconds of load before the first task")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        planned = {name: server(name, folder) for name in (GATE, QUOTAS, STATIC)}
        logs = [(each, folder / f"{name}.log") for name, each in planned.items()]
        servers = dict(zip(planned, stack.enter_context(all_serving(logs)), strict=True))
        text = _PAGE.read_text(encoding="utf-8")
        for name in ("my-quota.yaml", "my-pacing.yaml", "my-class.yaml"):
            (folder / name).write_text(_part_of(text, name), encoding="utf-8")
        table = asyncio.run(_try_all(servers, commands_by_task(text), folder, options.warmup))
    before, rest = text.split(_BEGIN, 1)
    after = rest.split(_END, 1)[1]
    _PAGE.write_text(f"{before}{_BEGIN}{table}{_END}{after}", encoding="utf-8")
    return 0


def _part_of(text: str, name: str) -> str:
    """The content of a file that the page names, which follows its name in backquotes."""
    found = re.search(rf"`{name}` is[^:`]*`?:? ?`([^`]+)`", text) or re.search(
        rf"`{name}`[^`]*`([^`]+)`", text
    )
    if found is None:
        raise RuntimeError(f"{_PAGE.name}: no content of {name}")
    return found[1].replace("\n", " ")


async def _try_all(
    servers: Mapping[str, Server], commands: Mapping[str, Sequence[str]], folder: Path, warmup: float
) -> str:
    os.environ["TANDEM_ADMIN_KEY"] = ADMIN_KEY
    urls = {name: each.url for name, each in servers.items()}
    ran: dict[str, list[Ran]] = {}
    async with browser() as chromium:
        async with loaded(servers):
            await asyncio.sleep(warmup)
            ids = await _ids(urls[GATE])

            async def run(task: str) -> None:
                url = urls[_SERVERS.get(task, QUOTAS)]
                ran[task] = [await _run(_filled(each, url, ids), folder) for each in commands[task]]

            for task in _CHANGES:
                await run(task)
            killed = servers[QUOTAS].process_id
            assert killed is not None
            os.kill(killed, DEATH_SIGNAL)
            await asyncio.sleep(_SETTLE_S)
            await overview(chromium, urls[QUOTAS], DOCS)
            await terminal(chromium, urls[QUOTAS], DOCS)
            pages = {task: await tried(chromium, task, urls, DOCS) for task in PAGES if task != _DRAIN}
            for task in commands:
                if task not in (*_CHANGES, _DRAIN):
                    await run(task)
            load = os.getloadavg()[0]
        pages[_DRAIN] = await tried(chromium, _DRAIN, urls, DOCS)
        await run(_DRAIN)
    return _table(pages, ran, load)


async def _ids(url: str) -> dict[str, str]:
    """Ids of a rejected request and of one that the gate preempted for another."""
    key = {"authorization": f"Bearer {ADMIN_KEY}"}
    found: dict[str, str] = {}
    number, is_more = 0, True
    while is_more:
        request = urllib.request.Request(f"{url}/admin/live?since={number}", headers=key)
        with await asyncio.to_thread(urllib.request.urlopen, request, timeout=10) as answer:
            records = json.load(answer)
        number, is_more = records["next"], records["more"]
        for record in records["records"]:
            if record["type"] == "rejection":
                found["ID"] = record["id"]
            elif record["type"] == "preemption" and record["for"] is not None:
                found["VICTIM"] = record["id"]
    if found.keys() != {"ID", "VICTIM"}:
        raise RuntimeError(f"under load only {sorted(found)} came about; raise --warmup")
    return found


def _filled(command: str, url: str, ids: Mapping[str, str]) -> str:
    """The page's command with the address of a server, ids of requests, and a short guard."""
    command = command.replace(_ADDRESS, url).replace("--guard 5m", f"--guard {_GUARD_S}s")
    return re.sub(r"\b(ID|VICTIM)\b", lambda name: ids[name[0]], command)


async def _run(command: str, folder: Path) -> Ran:
    """Runs a command in `folder`. Raises RuntimeError unless it ends with 0 and prints something."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    began = time.monotonic()
    shell = await asyncio.create_subprocess_shell(
        command, cwd=folder, env={**os.environ, "PATH": path}, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await shell.communicate()
    took = time.monotonic() - began
    if shell.returncode != 0 or not printed or b'"error"' in printed[:20]:
        raise RuntimeError(f"{command}: status {shell.returncode}, printed {printed[:500]!r}")
    sys.stdout.write(f"{took:6.2f} s  {command}\n")
    return Ran(command.startswith("tandem "), took)


def _table(pages: Mapping[str, float], ran: Mapping[str, Sequence[Ran]], load: float) -> str:
    def cell(task: str, *, is_terminal: bool) -> str:
        found = [f"{each.seconds:.2f}" for each in ran[task] if each.is_terminal is is_terminal]
        return ", ".join(found) or "not offered"

    rows = "".join(
        f"| {task} | {pages[task]:.2f} | {cell(task, is_terminal=True)} | {cell(task, is_terminal=False)} |\n"
        for task in PAGES
    )
    return _TABLE.format(load=f"{load:.0f}", guard=_GUARD_S, rows=rows)


if __name__ == "__main__":
    raise SystemExit(main())
