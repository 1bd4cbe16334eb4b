"""The admin key that a server makes at its start if none is configured and only its machine reaches it."""

import asyncio
import logging
import os
import stat
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from controlplane import cli
from controlplane.api import graceful_server
from controlplane.api.graceful_server import Hosting
from controlplane.commands.admin_api import KEY_VARIABLE
from controlplane.service import bootstrap
from controlplane.start_key import StartKey, kept_key
from tests.controlplane.api.scripted_server import until
from tests.controlplane.api.test_startup import hosted

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the key files; no command has a key from elsewhere."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_the_key_opens_admin_and_is_on_the_terminal_alone(
    folder, caplog, capsys, monkeypatch, is_terminal
):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    start_key = StartKey()
    async with hosted(Hosting(start_key=start_key)) as host:
        url = str(host.http.base_url)
        host.load.set_result(None)
        await until(lambda: host.service.is_started and "ready after" in caplog.text)
        (file,) = folder.iterdir()
        assert caplog.messages[-1].endswith(f"; dashboard {url}/dashboard/, its admin key in {file}")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.read_text(encoding="ascii") == start_key.key == kept_key(url)
        for key, status in (("other", 401), (start_key.key, 200)):
            sent = {"authorization": f"Bearer {key}"}
            assert (await host.http.get("/admin/state", headers=sent)).status_code == status
        # Its digest is no part of the configuration.
        sent = {"authorization": f"Bearer {start_key.key}"}
        shown = (await host.http.get("/admin/config", headers=sent)).json()
        assert shown["config"]["server"]["admin_key_sha256"] is None
        assert await asyncio.to_thread(cli.main, ["top", "--server", url, "--once"]) == 0
    printed = capsys.readouterr().out
    assert (f"open the dashboard: {url}/dashboard/#key={start_key.key}\n" in printed) == is_terminal
    assert printed.count(start_key.key) == is_terminal
    assert start_key.key not in caplog.text and start_key.sha256 not in caplog.text
    assert start_key.key not in repr(start_key)
    assert not file.exists() and kept_key(url) == ""


async def test_a_key_that_a_change_configures_replaces_that_of_the_start():
    start_key = StartKey()
    async with hosted(Hosting(start_key=start_key)) as host:
        host.load.set_result(None)
        await until(lambda: host.service.is_started)
        server = {"server": {"admin_key_sha256": sha256(b"mine").hexdigest()}}
        await host.service.reconfiguration.change(server, source="test")
        for key, status in ((start_key.key, 401), ("mine", 200)):
            sent = {"authorization": f"Bearer {key}"}
            assert (await host.http.get("/admin/state", headers=sent)).status_code == status


async def test_a_key_whose_file_cannot_be_written_is_still_shown(tmp_path, monkeypatch, caplog, capsys):
    (tmp_path / "cache").write_text("no folder", encoding="utf-8")
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    start_key = StartKey()
    async with hosted(Hosting(start_key=start_key)) as host:
        host.load.set_result(None)
        await until(lambda: host.service.is_started and "ready after" in caplog.text)
    assert "the admin key of this start is in no file" in caplog.text
    assert f"#key={start_key.key}" in capsys.readouterr().out


def test_a_full_disk_does_not_end_the_start(folder, monkeypatch, caplog):
    open_file = os.fdopen

    def opened(descriptor: int, mode: str, *, encoding: str):
        os.close(descriptor)
        return open_file(os.open("/dev/full", os.O_WRONLY), mode, encoding=encoding)

    monkeypatch.setattr(os, "fdopen", opened)
    with StartKey().kept(8_000) as path:
        assert path is None
    assert "is in no file: [Errno 28]" in caplog.text


def test_a_file_that_a_killed_server_left_is_replaced(folder):
    folder.mkdir()
    left = folder / "admin-key-8000"
    left.write_text("old", encoding="ascii")
    left.chmod(0o644)
    with StartKey().kept(8000) as path:
        assert path == left and stat.S_IMODE(left.stat().st_mode) == 0o600
        assert kept_key("http://localhost:8000") == kept_key("http://[::1]:8000/") != "old"
        for other in (
            "http://192.0.2.7:8000",
            "http://tandem.example:8000",
            "http://127.0.0.1:8001",
            "x",
            "",
        ):
            assert kept_key(other) == ""


@pytest.mark.parametrize(
    ("host", "server", "has_key"),
    [
        ("127.0.0.1", "", True),
        ("localhost", "", True),
        ("0.0.0.0", "open: true", False),
        ("127.0.0.1", f"admin_key_sha256: {'a' * 64}", False),
    ],
)
def test_serve_makes_a_key_only_where_it_is_needed(tmp_path, monkeypatch, host, server, has_key):
    seen: list[Hosting] = []
    monkeypatch.setattr(bootstrap, "assemble", lambda config: None)
    monkeypatch.setattr(graceful_server, "host_forever", lambda *arguments: seen.append(arguments[2]))
    monkeypatch.setattr(cli, "_end", lambda status: None)
    monkeypatch.setattr(cli, "set_up_logging", lambda section: None)
    monkeypatch.setattr(cli, "set_engine_log_level", lambda level: None)
    file = tmp_path / "serve.yaml"
    models = "models: {embeddings: [{model: tandem/minilm}]}"
    file.write_text(f"{models}\nserver: {{port: 0, host: {host}, {server}}}\n", encoding="utf-8")
    cli.main(["serve", str(file)])
    (hosting,) = seen
    assert (hosting.start_key is not None) == has_key
