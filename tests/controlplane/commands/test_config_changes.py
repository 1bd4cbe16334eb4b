"""The commands diff, apply and rollback against a server."""

import asyncio
import json
import re
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from controlplane.cli import main
from controlplane.commands import config_changes
from controlplane.commands.admin_api import KEY_VARIABLE
from controlplane.core.decision import Outcome
from tests.controlplane.api.scripted_server import (
    EMBED_MODEL,
    MODELS,
    SCRIPTED_WORKERS,
    Stage,
    listening,
    staged,
    until,
)

pytestmark = pytest.mark.long

SERVER = {"admin_key_sha256": sha256(b"root").hexdigest()}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "root")
    monkeypatch.setattr(config_changes, "_POLL_S", 0.01)


@asynccontextmanager
async def server(**sections: Any) -> AsyncIterator[tuple[Stage, str]]:
    async with staged(server=SERVER, **sections) as stage, listening(stage.app) as url:
        yield stage, url


def write(path: Path, **sections: Any) -> str:
    path.write_text(yaml.safe_dump({"models": MODELS, "server": SERVER, **sections}), encoding="utf-8")
    return str(path)


async def run(*words: str) -> int:
    return await asyncio.to_thread(main, words)


def test_diff_of_files_says_what_needs_a_restart(tmp_path, capsys):
    first = write(tmp_path / "a.yaml", classes={"gold": {"default": True, "ttft_ms": 5}})
    second = write(tmp_path / "b.yaml", pool={"margin": 0.2}, tenants={"t": {"api_keys_sha256": ["a" * 64]}})
    assert main(["diff", first, first]) == 0
    assert capsys.readouterr().out == "no key differs\n"
    assert main(["diff", first, second]) == 1
    shown = capsys.readouterr().out
    assert "classes.gold.ttft_ms: 5.0 -> null (live)\n" in shown
    assert "pool.margin: 0.1 -> 0.2 (needs a restart)\n" in shown
    assert 'tenants.t.api_keys_sha256: null -> ["***1"] (live)\n' in shown
    assert main(["diff", "--json", first, second]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["pool.margin"] == {"from": 0.1, "to": 0.2, "taken": "needs a restart"}


async def test_differences_are_tables_on_a_terminal(tmp_path, capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    first = write(tmp_path / "a.yaml")
    second = write(tmp_path / "b.yaml", pool={"margin": 0.2}, admission={"max_waiting": 5})
    assert main(["diff", first, second]) == 1
    shown = capsys.readouterr().out
    assert "a.yaml" in shown and "\x1b[33mneeds a restart" in shown and "\x1b[32mlive" in shown
    assert re.search(r"pool\.margin +0\.1 +0\.2", shown)
    async with server() as (_, url):
        assert await run("diff", second, "--server", url) == 1
        shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        assert re.search(r"differs, live *\n *key +from +to *\n *admission\.max_waiting +1000 +5 *\n", shown)
        assert re.search(r"pool\.margin +0\.1 +0\.2 +the memory is divided at the start", shown)
        assert await run("diff", second, "--server", url, "--json") == 1
        assert json.loads(capsys.readouterr().out)["applied"]["admission.max_waiting"]["to"] == 5


async def test_diff_with_a_server_changes_nothing(tmp_path, capsys):
    async with server() as (stage, url):
        same = write(tmp_path / "same.yaml")
        assert await run("diff", same, "--server", url) == 0
        other = write(tmp_path / "other.yaml", admission={"max_waiting": 5}, pool={"margin": 0.2})
        assert await run("diff", other, "--server", url) == 1
        assert capsys.readouterr().out.splitlines() == [
            "no key differs",
            "differs, live:",
            "  admission.max_waiting: 1000 -> 5",
            "differs, needs a restart:",
            "  pool.margin: 0.1 -> 0.2 (the memory is divided at the start)",
        ]
        assert stage.service.reconfiguration.active.number == 1


async def test_apply_and_rollback(tmp_path, capsys):
    async with server() as (stage, url):
        file = write(tmp_path / "new.yaml", admission={"max_waiting": 5})
        assert await run("apply", file, "--server", url, "--dry-run") == 0
        assert "would be applied:" in capsys.readouterr().out
        assert await run("apply", file, "--server", url) == 0
        assert "applied:\n  admission.max_waiting: 1000 -> 5\n" in capsys.readouterr().out
        assert stage.service.reconfiguration.active.source == "tandem apply"
        (tmp_path / "part.yaml").write_text("admission: {max_waiting: 6}\n")
        assert await run("apply", str(tmp_path / "part.yaml"), "--server", url, "--if-match", '"1-0"') == 2
        assert "412" in capsys.readouterr().err
        assert await run("apply", str(tmp_path / "part.yaml"), "--server", url, "--json") == 0
        assert json.loads(capsys.readouterr().out)["version"] == 3
        assert await run("rollback", "--server", url) == 0
        assert stage.service.config.admission.max_waiting == 5
        assert await run("rollback", "--server", url, "--version", "1") == 0
        assert stage.service.config.admission.max_waiting == 1_000


async def test_a_change_for_a_time_is_undone_by_the_server(tmp_path, capsys):
    async with server() as (stage, url):
        (tmp_path / "part.yaml").write_text("admission: {max_waiting: 6}\n")
        assert await run("apply", str(tmp_path / "part.yaml"), "--server", url, "--for", "100ms") == 0
        assert "undone by the server after 0.1 s" in capsys.readouterr().out
        await until(lambda: stage.service.reconfiguration.active.number == 3)
        assert stage.service.config.admission.max_waiting == 1_000
    with pytest.raises(SystemExit, match="2"):
        main(["apply", "a.yaml", "--server", url, "--for", "1h", "--guard", "5m"])


async def test_a_whole_configuration_keeps_the_options_of_the_command_line(tmp_path, capsys):
    """As in the images, which are started with `--host 0.0.0.0 --open` and a file that states neither."""
    options = {"host": "0.0.0.0", "open": True}
    async with staged(server=SERVER | options) as stage, listening(stage.app) as url:
        stage.service.reconfiguration.overrides = options
        assert await run("diff", write(tmp_path / "my.yaml"), "--server", url) == 0
        file = write(tmp_path / "new.yaml", server=SERVER | {"drain_ms": 5}, admission={"max_waiting": 5})
        assert await run("apply", file, "--server", url, "--json") == 0
        (tmp_path / "part.yaml").write_text("server: {drain_ms: 6}\n")
        assert await run("apply", str(tmp_path / "part.yaml"), "--server", url) == 0
        found = stage.service.config.server
        assert (found.host, found.open, found.drain_ms) == ("0.0.0.0", True, 6)
    _, shown = capsys.readouterr().out.split("no key differs\n")
    answer, _ = json.JSONDecoder().raw_decode(shown)
    assert set(answer["applied"]) == {"server.drain_ms", "admission.max_waiting"}
    assert answer["needs_restart"] == {}


@pytest.mark.parametrize("form", ["{}", '"{}"', "*"])
async def test_an_etag_is_accepted_without_the_quotes_that_a_shell_removes(tmp_path, capsys, form):
    (tmp_path / "part.yaml").write_text("admission: {max_waiting: 6}\n")
    async with server() as (stage, url):
        etag = form.format(stage.service.reconfiguration.active.etag.strip('"'))
        words = ["apply", str(tmp_path / "part.yaml"), "--server", url, "--if-match", etag]
        assert await run(*words) == 0
        assert await run(*words) == (0 if form == "*" else 2)
    assert ("412" in capsys.readouterr().err) == (form != "*")


@pytest.mark.parametrize(("outcome", "status", "most"), [(Outcome.MET, 0, 5), (Outcome.REJECTED, 1, 1_000)])
async def test_a_guarded_change_is_followed_to_its_end(tmp_path, capsys, outcome, status, most):
    async with server() as (stage, url):
        attainment, now = stage.service.gate.dispatcher.recorder.attainment, stage.service.gate.clock.now

        def end(how: Outcome) -> None:
            for _ in range(50):
                attainment.count("standard", how, now())

        end(Outcome.MET)
        classes = {"standard": {"default": True}, "silver": {}}
        file = write(tmp_path / "new.yaml", admission={"max_waiting": 5}, classes=classes)
        stage.service.reconfiguration.listeners.append(
            lambda version: asyncio.get_running_loop().call_soon(end, outcome)
        )
        assert await run("apply", file, "--server", url, "--guard", "300ms", "--drop", "3") == status
        assert stage.service.config.admission.max_waiting == most
    shown = capsys.readouterr().out
    assert "watching for 0.3 s" in shown
    # Said at once, and again with the verdict.
    assert "\nnot judged, with fewer than 20 requests in the time before: silver\n" in shown
    if status:
        assert "rolled_back: class standard" in shown
    else:
        assert "kept: no judged class lost more than 3 points; not judged, with fewer than 20" in shown
        assert shown.endswith("since the change: silver (0 before, 0 since)\n")


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (["diff", "FILE"], 2, "give either a second file or --server URL"),
        (["diff", "FILE", "none.yaml"], 2, "none.yaml: No such file"),
        (["diff", "none.yaml", "--server", "URL"], 2, "none.yaml: No such file"),
        (["apply", "none.yaml", "--server", "URL"], 2, "none.yaml: No such file"),
        (["apply", "BAD", "--server", "URL"], 2, "400: change: admission.max_waiting=-1"),
        (["apply", "FILE", "--server", "URL", "--drop", "3"], 2, "--drop: only with --guard"),
        (["apply", "FILE", "--server", "http://127.0.0.1:1"], 1, "is the server running there?"),
        (["apply", "FILE", "--server", "nonsense"], 1, "nonsense/admin/config"),
        (["diff", "FILE", "--server", "http://127.0.0.1:1"], 2, "is the server running there?"),
        (["rollback", "--server", "URL", "--version", "9"], 2, "this server has the versions 1"),
        (["rollback", "--server", "URL", "--key-file", "KEY"], 2, "unknown admin key"),
        (["rollback", "--server", "URL", "--key-file", "none"], 2, "none: No such file"),
        (["rollback", "--server", "URL", "--key-file", "BINARY"], 2, "binary: not UTF-8"),
    ],
)
async def test_errors_name_the_remedy(tmp_path, capsys, words, status, expected):
    file = write(tmp_path / "a.yaml")
    bad = write(tmp_path / "bad.yaml", admission={"max_waiting": -1})
    (tmp_path / "key").write_text("wrong\n")
    (tmp_path / "binary").write_bytes(b"\xff")
    async with server() as (stage, url):
        names = {"FILE": file, "BAD": bad, "URL": url, "KEY": str(tmp_path / "key")}
        names["BINARY"] = str(tmp_path / "binary")
        assert await run(*(names.get(word, word) for word in words)) == status
        assert stage.service.reconfiguration.active.number == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"<html></html>", b"[]", b"\xff"])
async def test_another_service_is_named(tmp_path, capsys, content):
    async def other(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": content})

    file = write(tmp_path / "a.yaml")
    async with listening(other) as url:
        for words in (["diff", file], ["apply", file], ["explain", "id"], ["drain"], ["top", "--once"]):
            assert await run(*words, "--server", url) == 1 + (words[0] == "diff")
            assert "no JSON object; is a Tandem server there?" in capsys.readouterr().err


async def test_the_key_is_needed(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE)
    assert await run("rollback", "--server", "http://127.0.0.1:1") == 2
    assert "no admin key; set TANDEM_ADMIN_KEY or give --key-file FILE" in capsys.readouterr().err


async def test_the_commands_of_the_operator_guide_run(tmp_path, capsys):
    """In the order of the page; only `diff` ends with 1, because it finds a difference."""
    guide = (Path(__file__).parents[3] / "docs/operator-guide.md").read_text(encoding="utf-8")
    commands = re.findall(r"^tandem ((?:diff|apply|rollback) .*)$", guide, re.MULTILINE)
    assert len(commands) == 6
    write(tmp_path / "my-old.yaml")
    write(tmp_path / "my-new.yaml", admission={"max_waiting": 5})
    async with server() as (stage, url):
        for command in commands:
            here = command.replace("http://127.0.0.1:8000", url).replace("5m", "300ms")
            words = shlex.split(here, comments=True)
            status = await run(*(str(tmp_path / word) if word.endswith(".yaml") else word for word in words))
            assert status == (words[0] == "diff"), command
        assert [version.source for version in stage.service.reconfiguration.versions] == [
            "start", "tandem apply", "tandem rollback",
        ]  # fmt: skip


async def test_apply_says_what_happens_to_workers(tmp_path, capsys):
    models = {**MODELS, "embeddings": [{"model": "second"}]}
    file = write(tmp_path / "a.yaml", models=models)
    async with server(worker_builder=SCRIPTED_WORKERS) as (_, url):
        assert await run("apply", file, "--server", url) == 0
    shown = capsys.readouterr().out
    assert "models.embeddings.0.model" in shown
    assert "  second: start, 1,000,000 bytes of weights and 1,000,000 of passes\n" in shown
    assert f"  {EMBED_MODEL}: stop\n  reserved: " in shown


@pytest.mark.parametrize("given", ["5", "0s", "-1m", "m", "5d"])
def test_a_time_has_a_unit(given, capsys):
    with pytest.raises(SystemExit):
        main(["apply", "a.yaml", "--server", "u", f"--guard={given}"])
    assert "should be a time above 0 with a unit" in capsys.readouterr().err
