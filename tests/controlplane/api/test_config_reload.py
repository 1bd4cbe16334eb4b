"""The configuration file is applied again on signals, and when its content changes."""

import asyncio
import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from backends.testing.scripted import ScriptedEmbedder
from controlplane.api import config_reload, graceful_server
from controlplane.api.config_reload import ConfigReload
from controlplane.api.early_signals import RELOADING, early_signals
from controlplane.api.graceful_server import Hosting, _host
from controlplane.config import parse
from controlplane.config.config_file import ConfigFile
from controlplane.core.errors import BackendDown
from controlplane.service.bootstrap import build_service
from tests.controlplane.api.scripted_server import (
    MODELS,
    Stage,
    staged,
    until,
)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("harmless_signals")]

INTERVAL = 0.005


def write(path: Path, **sections: Any) -> None:
    path.write_text(yaml.safe_dump({"models": MODELS, **sections}), encoding="utf-8")


def waiting(most: object) -> dict[str, Any]:
    return {"admission": {"max_waiting": most}}


@pytest.fixture
def file(tmp_path: Path) -> ConfigFile:
    write(tmp_path / "tandem.yaml")
    return ConfigFile(tmp_path / "tandem.yaml", {"port": 9_000})


def most_waiting(stage: Stage) -> int:
    return stage.service.config.admission.max_waiting


@pytest.mark.parametrize("number", RELOADING)
async def test_a_signal_reloads_the_file_and_ends_nothing(number: int, file: ConfigFile, caplog):
    caplog.set_level("INFO")
    async with staged(server={"port": 9_000}) as stage:
        reload = ConfigReload(stage.service, file)
        with reload.on_signals():
            write(file.path, **waiting(7))
            # Before the service runs, a signal is kept.
            os.kill(os.getpid(), number)
            async with reload.running():
                await until(lambda: most_waiting(stage) == 7)
                assert stage.service.reconfiguration.active.source == f"{file.path} (signal)"
                write(file.path, **waiting(-7))
                os.kill(os.getpid(), number)
                await until(lambda: "failed" in caplog.text)
                assert most_waiting(stage) == 7
    assert "applied" not in caplog.text
    assert "configuration version 2" in caplog.text
    assert "admission.max_waiting: 1000 -> 7" in caplog.text
    assert "admission.max_waiting=-7: should be greater than or equal to 0" in caplog.text


async def test_a_signal_before_the_event_loop_reloads_the_file_once_it_runs(file: ConfigFile):
    async with staged(server={"port": 9_000}) as stage:
        with early_signals() as came:
            os.kill(os.getpid(), signal.SIGHUP)
            assert came == [signal.SIGHUP]
            write(file.path, **waiting(7))
            reload = ConfigReload(stage.service, file)
            with reload.on_signals(came):
                async with reload.running():
                    await until(lambda: most_waiting(stage) == 7)


async def test_without_a_file_a_signal_changes_nothing(caplog):
    async with staged() as stage:
        reload = ConfigReload(stage.service, None)
        with reload.on_signals():
            async with reload.running(INTERVAL):
                os.kill(os.getpid(), signal.SIGHUP)
                await until(lambda: "no configuration file was given" in caplog.text)
                assert stage.service.reconfiguration.active.number == 1


async def test_a_replaced_symbolic_link_is_noticed(tmp_path: Path):
    """The kubelet writes a new folder and renames a link to it over the old one; the file's link stays."""
    for name, most in (("..one", 5), ("..two", 6)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "tandem.yaml", **waiting(most))
    (tmp_path / "..data").symlink_to("..one")
    (tmp_path / "tandem.yaml").symlink_to("..data/tandem.yaml")
    file = ConfigFile(tmp_path / "tandem.yaml", {})
    async with staged(**waiting(5)) as stage:
        async with ConfigReload(stage.service, file).running(INTERVAL):
            (tmp_path / "..next").symlink_to("..two")
            (tmp_path / "..next").rename(tmp_path / "..data")
            await until(lambda: most_waiting(stage) == 6)
        assert stage.service.reconfiguration.active.source == f"{file.path} (watch)"


async def test_an_invalid_file_is_logged_once_and_a_valid_one_applied(file: ConfigFile, caplog):
    async with staged(server={"port": 9_000}) as stage, ConfigReload(stage.service, file).running(INTERVAL):
        write(file.path, classes={"gold": {"default": True, "ttft_m": 5}})
        await until(lambda: "failed" in caplog.text)
        await asyncio.sleep(5 * INTERVAL)
        assert stage.service.reconfiguration.active.number == 1
        write(file.path, **waiting(8))
        await until(lambda: most_waiting(stage) == 8)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "configuration version 1 stays in force" in line
    assert "classes.gold.ttft_m: unknown key; did you mean 'ttft_ms'?" in line


async def test_a_defect_in_one_reload_does_not_end_the_next(
    file: ConfigFile, monkeypatch: pytest.MonkeyPatch, caplog
):
    load, defects = ConfigFile.load, [KeyError("an option that a plug-in expects")]

    def faulty(self: ConfigFile) -> Any:
        if defects:
            raise defects.pop()
        return load(self)

    monkeypatch.setattr(ConfigFile, "load", faulty)
    async with staged(server={"port": 9_000}) as stage, ConfigReload(stage.service, file).running(INTERVAL):
        write(file.path, **waiting(7))
        await until(lambda: not defects)
        write(file.path, **waiting(8))
        await until(lambda: most_waiting(stage) == 8)
    assert "Traceback" in caplog.text and "an option that a plug-in expects" in caplog.text


async def test_content_is_applied_once_two_reads_agree(file: ConfigFile, monkeypatch: pytest.MonkeyPatch):
    """`None` is a read between two steps of a replacement, and `half` one while the file is written."""
    reads = iter(["start", "start", None, None, "half", "whole", "whole"])
    loads: list[str] = []
    done = asyncio.Event()

    def digest(_: ConfigFile) -> str:
        found = next(reads, "whole")
        loads.append(str(found))
        return found

    def load(_: ConfigFile) -> Any:
        assert loads[-2:] == ["whole", "whole"]
        done.set()
        return parse({"models": MODELS, "server": {"port": 9_000}, **waiting(9)})

    monkeypatch.setattr(config_reload, "_digest_of", digest)
    monkeypatch.setattr(ConfigFile, "load", load)
    async with staged(server={"port": 9_000}) as stage, ConfigReload(stage.service, file).running(INTERVAL):
        await asyncio.wait_for(done.wait(), 5)
        await until(lambda: most_waiting(stage) == 9)


async def test_a_change_is_tried_again_while_the_engine_is_down(file: ConfigFile):
    tries = 0

    async def down() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise BackendDown("it restarts")

    async with staged(server={"port": 9_000}, scheduling={"engine": {"ordering": "edf"}}) as stage:
        stage.generator.on_order = down
        async with ConfigReload(stage.service, file).running(INTERVAL):
            write(file.path, scheduling={"engine": {"ordering": "srmt"}})
            await until(lambda: stage.service.config.scheduling.engine == {"ordering": "srmt"})
        assert tries == 3


async def test_options_of_the_command_line_stay(file: ConfigFile):
    async with staged(server={"port": 9_000}) as stage:
        write(file.path, server={"port": 1, "drain_ms": 5})
        change = await stage.service.reconfiguration.replace(file.load(), source="test")
        assert (list(change.plan.applied), change.plan.needs_restart) == (["server.drain_ms"], {})


@pytest.mark.parametrize("number", RELOADING)
async def test_a_signal_during_the_start_is_obeyed_after_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The log follows the file too, options of the command line stay, and SIGTERM still ends the server."""
    forms: list[str] = []
    monkeypatch.setattr(graceful_server, "update_logging", lambda section: forms.append(section.format))
    path, may_start = tmp_path / "tandem.yaml", asyncio.Event()
    path.write_text(
        "models: {embeddings: [{model: m}]}\nadmission: {max_waiting: 4}\nlog: {format: json}\n",
        encoding="utf-8",
    )
    config = parse({"models": {"embeddings": [{"model": "m"}]}, "server": {"port": 0}})
    embedder = ScriptedEmbedder(model="m")
    start = embedder.start

    async def slow() -> None:
        await may_start.wait()
        await start()

    embedder.start = slow
    service = build_service(config, [], [embedder], workspace_bytes=embedder.workspace_bytes)
    hosting = asyncio.create_task(_host(service, config, Hosting(ConfigFile(path, {"port": 0}))))
    await asyncio.sleep(0)
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.05)
    assert not hosting.done()
    may_start.set()
    await until(lambda: service.config.admission.max_waiting == 4)
    assert forms == ["json"]
    same = await service.reconfiguration.change(yaml.safe_load(path.read_text()), source="test")
    assert (same.plan.applied, same.plan.needs_restart) == ({}, {})
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(hosting, 10) == 0
    gc.unfreeze()
