"""One box as Ray Serve calls it, without Ray: its configuration changes in place."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from controlplane.config import Config
from controlplane.fleet_on_ray import box
from controlplane.service.bootstrap import build_service
from controlplane.service.service import Service
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL

CONTENT = {
    "models": {"chat": {"model": CHAT_MODEL}, "embeddings": [{"model": EMBED_MODEL}]},
    "classes": {"quick": {"default": True}, "slow": {"weight": 2}},
}


class _Kept(box.Box):
    def __del__(self) -> None:  # type: ignore[override]
        """Ray Serve awaits that of a box, which the interpreter would call too."""


@pytest.fixture
async def started(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A box with scripted engines."""

    def assemble(config: Config) -> Service:
        generator, embedder = ScriptedGenerator(model=CHAT_MODEL), ScriptedEmbedder(model=EMBED_MODEL)
        return build_service(config, [generator], [embedder], workspace_bytes=embedder.workspace_bytes)

    monkeypatch.setattr(box, "assemble", assemble)
    made = _Kept.__new__(_Kept)
    await made.__init__(CONTENT, "router-key")  # type: ignore[misc]
    yield made
    await box.Box.__del__(made)


def weight(made: Any) -> float:
    return made._service.config.classes["slow"].weight


async def test_a_part_is_laid_over_the_file_and_an_empty_one_is_the_file(started: Any) -> None:
    await started.reconfigure({})
    versions = started._service.reconfiguration
    assert (versions.active.number, weight(started)) == (1, 2)
    await started.reconfigure({"classes": {"slow": {"weight": 5}}})
    assert (versions.active.number, versions.active.source, weight(started)) == (2, "user_config", 5)
    assert started._service.config.server.router_key_sha256 is not None
    await started.reconfigure({"classes": {"quick": {"weight": 3}}})
    assert weight(started) == 2
    await started.reconfigure({})
    assert (versions.active.number, started._service.config.classes["quick"].weight) == (4, None)


@pytest.mark.parametrize("server", [{}, {"router_key_sha256": "0" * 64}, {"router_key_sha256": None}])
@pytest.mark.parametrize("whole", [CONTENT, {}], ids=["whole", "part"])
async def test_no_change_takes_the_routers_key_from_the_box(
    started: Any, whole: dict[str, Any], server: dict[str, Any]
) -> None:
    """As `tandem apply` sends it to each box: routers poll with the key, whatever the document states."""
    versions = started._service.reconfiguration
    key = started._service.config.server.router_key_sha256
    stated = {**whole, "server": {"drain_ms": 7, **server}}
    await versions.change(stated, source="tandem apply")
    assert started._service.config.server.drain_ms == 7
    assert started._service.config.server.router_key_sha256 == key is not None
    await started.reconfigure({**stated, "server": {"drain_ms": 8, **server}})
    assert started._service.config.server.drain_ms == 8
    assert started._service.config.server.router_key_sha256 == key


@pytest.mark.parametrize("part", [{"classes": {"slow": {"weight": -1}}}, {"no": 1}, ["no"]])
async def test_what_cannot_be_applied_leaves_the_box_as_it_was(
    started: Any, part: object, caplog: pytest.LogCaptureFixture
) -> None:
    await started.reconfigure(part)
    assert started._service.reconfiguration.active.number == 1
    assert started._service.reconfiguration.failure().startswith("the change by user_config failed")
    assert "user_config: the change failed" in caplog.text
    await started.check_health()


async def test_keys_that_need_a_restart_are_named(started: Any, caplog: pytest.LogCaptureFixture) -> None:
    await started.reconfigure({"pool": {"memory": "1GiB"}, "classes": {"slow": {"weight": 5}}})
    assert weight(started) == 5
    assert "pool.memory: needs a restart; change the file and deploy it under another name" in caplog.text
