"""Client, HAProxy, router and box without a Ray cluster; HAProxy has the configuration that Ray Serve writes.

Of Ray Serve, only the membership is replaced.
"""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from benchmark_control_plane.common.servers import free_port
from controlplane.api.settings import ApiSettings
from controlplane.fleet_on_ray.box import at_root, without_request_id
from controlplane.fleet_on_ray.kind_names import application_name, route_prefix
from controlplane.fleet_on_ray.route_query import HEADER_ROUTE
from tests.controlplane.api.scripted_server import CHAT_MODEL, Stage, listening, listens, staged
from tests.controlplane.fleet_on_ray.ray_marks import NEEDS_RAY

pytestmark = NEEDS_RAY

SETTINGS = ApiSettings(router_key_sha256=sha256(b"router").hexdigest())
BODY = {"model": CHAT_MODEL, "prompt": "x"}


Kinds = dict[str, dict[str, str]]
"""URLs of boxes by kind and name."""


def full_id(kind: str, name: str) -> str:
    return f"SERVE_REPLICA::tandem-{kind}#Box#{name}"


def replica(kind: str, name: str, url: str) -> Any:
    """What is read of Ray's `RunningReplica`."""
    host, port = url.removeprefix("http://").split(":")
    return SimpleNamespace(
        replica_id=SimpleNamespace(unique_id=name, to_full_id_str=lambda: full_id(kind, name)),
        backend_http_endpoint=(host, int(port)),
    )


def as_replica(app: ASGIApp, path: str) -> ASGIApp:
    """The box as Ray serves it: under its application's path, and with that of HAProxy's health checks."""
    box = at_root(without_request_id(app))

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/-/healthz":
            assert scope["path"].startswith(path), scope["path"]
            await box(
                {**scope, "root_path": path.rstrip("/")} if scope["type"] == "http" else scope, receive, send
            )
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    return served


@asynccontextmanager
async def running_haproxy(folder: Path, kinds: Kinds, *routers: str) -> AsyncIterator[str]:
    """HAProxy with the configuration that Ray Serve writes for these addresses; yields its URL."""
    from ray.serve._private import haproxy

    options = haproxy.HTTPOptions(host="127.0.0.1", port=free_port())
    config = haproxy.HAProxyConfig(
        http_options=options, metrics_port=free_port(), stats_port=free_port(), nbthread=1,
        health_check_inter="200ms", socket_path=str(folder / "admin.sock"), metrics_enabled=False,
        enable_hap_optimization=False, timeout_connect_s=1,
    )  # fmt: skip

    def server(replica_id: str, url: str) -> Any:
        host, port = url.removeprefix("http://").split(":")
        # As Ray Serve makes names for HAProxy.
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", replica_id.replace("#", "-"))
        return haproxy.ServerConfig(name, host, int(port), replica_id)

    backends = [
        haproxy.BackendConfig(
            name=f"http-{application_name(kind)}", path_prefix=route_prefix(kind, is_first=number == 0),
            app_name=application_name(kind),
            servers=[server(full_id(kind, name), url) for name, url in boxes.items()],
            # Ray Serve names the routers only of an application that has boxes.
            ingress_request_router_servers=[server("router", router) for router in routers if boxes],
            fallback_server=server("proxy", f"http://127.0.0.1:{free_port()}"),
        )
        for number, (kind, boxes) in enumerate(kinds.items())
    ]  # fmt: skip
    file = folder / "haproxy.cfg"
    written = haproxy.HAProxyApi(
        cfg=config, backend_configs={each.name: each for each in backends}, config_file_path=str(file)
    )
    written._generate_config_file_internal()
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "controlplane.fleet_on_ray.haproxy", "-db", "-f", str(file),
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "RAY_SERVE_HAPROXY_BINARY_PATH": "/nonexistent"},
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(5):
            while not await listens(options.port):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{options.port}"
    finally:
        program.kill()
        await program.wait()


@dataclass
class Fleet:
    """Two boxes, a router and HAProxy; leaving `first` or `second` ends that box's listener."""

    http: httpx.AsyncClient
    stages: list[Stage]
    queries: list[str]
    first: AsyncExitStack
    second: AsyncExitStack
    boxes: Any

    async def drained(self, *names: str) -> None:
        """Drains boxes, and waits until the router knows that they serve no model."""
        for name, stage in zip(("first", "second"), self.stages, strict=True):
            if name in names:
                await stage.service.drain()
        async with asyncio.timeout(5):
            while sum(not one.models for one in self.boxes._fleet.reports()) < len(names):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running_fleet(
    folder: Path,
    kinds: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_first_kind_empty: bool = False,
    other_router: str | None = None,
) -> AsyncIterator[Fleet]:
    """A fleet whose boxes are of these kinds. HAProxy may not know the box of the first kind.

    `other_router` is the URL of a router beside that of the fleet.
    """
    from controlplane.fleet_on_ray.box_router import BoxChooser
    from controlplane.fleet_on_ray.known_boxes import KnownBoxes

    monkeypatch.setattr("ray.serve._private.haproxy.SERVE_SESSION_ID", HEADER_ROUTE)
    known, queries = KnownBoxes("router"), []
    choose = known._choose
    monkeypatch.setattr(known, "_choose", lambda query: queries.append(query) or choose(query))
    chooser = object.__new__(BoxChooser)
    chooser._boxes = known
    async with AsyncExitStack() as stack:
        stages = [await stack.enter_async_context(staged(SETTINGS)) for _ in range(2)]
        listeners = [await stack.enter_async_context(AsyncExitStack()) for _ in range(2)]
        urls: Kinds = {kind: {} for kind in kinds}
        for kind, name, stage, listener in zip(kinds, ("first", "second"), stages, listeners, strict=True):
            path = route_prefix(kind, is_first=kind == kinds[0])
            urls[kind][name] = await listener.enter_async_context(listening(as_replica(stage.app, path)))
        if is_first_kind_empty:
            urls[kinds[0]].clear()
        stack.push_async_callback(known.polls.stop)
        for kind, boxes in urls.items():
            path = route_prefix(kind, is_first=kind == kinds[0])
            known.set_replicas(path, [replica(kind, name, url) for name, url in boxes.items()], 1.0)
        asked = await stack.enter_async_context(listening(chooser.__serve_build_asgi_app__()))
        routers = [asked] if other_router is None else [asked, other_router]
        # Made first: on a busy machine it takes longer than the time limit of a health check.
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=5, trust_env=False))
        http.base_url = httpx.URL(await stack.enter_async_context(running_haproxy(folder, urls, *routers)))
        yield Fleet(http, stages, queries, *listeners, known)


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path, ("box", "box"), monkeypatch) as found:
        yield found


async def test_a_request_reaches_the_chosen_box_past_the_router(fleet: Fleet) -> None:
    await fleet.drained("second")
    headers = {"x-service-class": "standard", "x-session-id": "user 7", HEADER_ROUTE: "class=forged"}
    for _ in range(4):
        answer = await fleet.http.post(
            "/v1/completions", json=BODY, headers={**headers, "x-request-id": "mine"}
        )
        assert answer.status_code == 200, answer.text
    assert len(fleet.stages[0].generator.runs) == 4
    size = len(answer.request.content)
    assert fleet.queries[-1] == (
        f"path=%2Fv1%2Fcompletions&bytes={size}&class=standard&class=&class=&session=user%207"
    )


async def test_a_router_that_is_silent_delays_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node may be cut off. Ray Serve asks it for every other request and waits for the time limit."""
    monkeypatch.setattr("ray.serve._private.haproxy.RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S", 1)
    asked = 0

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.read()
        writer.close()

    async with await asyncio.start_server(never_answer, "127.0.0.1", 0) as silent:
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        async with running_fleet(tmp_path, ("box", "box"), monkeypatch, other_router=url) as fleet:
            for _ in range(8):
                answer = await fleet.http.post("/v1/completions", json=BODY)
                assert answer.status_code == 200, answer.text
            assert len(fleet.queries) == 8
    assert asked == 1


async def test_a_box_that_is_gone_is_neither_asked_nor_missed(fleet: Fleet) -> None:
    await fleet.first.aclose()
    # The first requests may be sent before the router knows: HAProxy then takes the other box.
    for _ in range(8):
        answer = await fleet.http.post("/v1/completions", json=BODY)
        assert answer.status_code == 200, answer.text
    assert len(fleet.stages[1].generator.runs) == 8


async def test_without_a_box_the_answer_is_a_503_with_retry_after(fleet: Fleet) -> None:
    await fleet.first.aclose()
    await fleet.second.aclose()
    async with asyncio.timeout(2):
        refused = await fleet.http.post("/v1/completions", json=BODY)
    assert (refused.status_code, refused.headers.get("retry-after")) == (503, "2")
    ready = await fleet.http.get("/ready")
    assert (ready.status_code, ready.headers.get("retry-after")) == (503, "2")


async def test_the_boxs_own_refusal_keeps_its_retry_after(fleet: Fleet) -> None:
    await fleet.drained("first", "second")
    own = await fleet.stages[0].http.post("/v1/completions", json=BODY)
    through = await fleet.http.post("/v1/completions", json=BODY)
    assert through.status_code == own.status_code == 503
    assert through.headers["retry-after"] == own.headers["retry-after"]
    assert through.json()["error"]["code"] == "shutting_down"


async def test_a_box_of_another_kind_than_that_of_the_path_gets_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_fleet(tmp_path, ("chat", "search"), monkeypatch) as fleet:
        await fleet.drained("first")
        for _ in range(4):
            answer = await fleet.http.post("/v1/completions", json=BODY)
            assert answer.status_code == 200, answer.text
        assert (len(fleet.stages[0].generator.runs), len(fleet.stages[1].generator.runs)) == (0, 4)
        hidden = await fleet.http.post("/-tandem/search/v1/completions", json=BODY)
        assert hidden.status_code == 404


async def test_the_other_kinds_serve_while_the_first_has_no_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_fleet(tmp_path, ("chat", "search"), monkeypatch, is_first_kind_empty=True) as fleet:
        for _ in range(4):
            answer = await fleet.http.post("/v1/completions", json=BODY)
            assert answer.status_code == 200, answer.text
        assert len(fleet.stages[1].generator.runs) == 4


@pytest.mark.parametrize(
    ("kind", "status", "runs"), [("search", 200, (0, 4)), ("chat", 200, (4, 0)), ("other", 503, (0, 0))]
)
async def test_a_box_that_haproxy_does_not_know_yet_is_replaced_by_one_of_its_kind_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, status: int, runs: tuple[int, int]
) -> None:
    """The routers know a new box before HAProxy does; boxes of another kind may lack its models."""
    async with running_fleet(tmp_path, ("chat", "search"), monkeypatch) as fleet:
        fleet.boxes._replicas["new"] = replica(kind, "new", "http://127.0.0.1:1")
        monkeypatch.setattr(fleet.boxes, "_choose", lambda query: "new")
        answers = [await fleet.http.post("/v1/completions", json=BODY) for _ in range(4)]
        assert {answer.status_code for answer in answers} == {status}
        assert all(answer.headers.get("retry-after") == "2" for answer in answers if status == 503)
        assert tuple(len(stage.generator.runs) for stage in fleet.stages) == runs
