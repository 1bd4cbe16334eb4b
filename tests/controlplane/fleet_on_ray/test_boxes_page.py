"""The page over the boxes of a fleet over HTTP: its data, its keys and its files, without Ray."""

import re
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from hashlib import sha256

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from controlplane.api.operations.dashboard import FLEET_MEDIA_TYPES, FOLDER
from controlplane.api.settings import ApiSettings
from controlplane.config.server_and_tenants import ServerSection
from controlplane.fleet.load_report import LoadReport, ModelLoad, OwnerLoad
from controlplane.fleet.router import Router
from controlplane.fleet_on_ray.box import at_root
from controlplane.fleet_on_ray.boxes_page import boxes_page
from controlplane.fleet_on_ray.load_polls import BoxState, LoadPolls
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, listening, staged
from tests.controlplane.fleet_on_ray.test_load_polls import until

KINDS = {"": "both", "/-tandem/search": "search"}
KEYS = ServerSection(
    admin_key_sha256=sha256(b"admin").hexdigest(), metrics_key_sha256=sha256(b"metrics").hexdigest()
)
ADMIN = {"authorization": "Bearer admin"}


def report(use: float = 0.5, met: float = 0.95, *, serves: bool = True) -> LoadReport:
    models = {"llama": ModelLoad("llm", 1e-5, 10)} if serves else {}
    owners = {"llm": OwnerLoad({"chat": 0.12, "batch": 3.4}, 0.25, 3 * 2**30)}
    return LoadReport("epoch", 1, 0.0, models, owners, use, {"chat": met})


STATES = [
    BoxState("a", "http://10.0.0.1:30000", report()),
    BoxState("b", "http://10.0.0.2:30000", None),
    BoxState("c", "http://10.0.0.3:30001/-tandem/search", report(0.9, 0.5)),
]


def page(states: Iterable[BoxState] = STATES, server: ServerSection = KEYS) -> ASGIApp:
    """The page as Ray Serve calls it: with the whole path, and the application's path beside it."""
    app = at_root(boxes_page(lambda: states, KINDS, server))

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "root_path": "/fleet"}, receive, send)

    return called


@pytest.fixture
def http() -> Iterator[httpx.AsyncClient]:
    yield client(page())


def client(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://fleet")


async def test_the_data_are_the_last_reports_of_boxes_that_serve() -> None:
    settings = ApiSettings(router_key_sha256=sha256(b"router").hexdigest())
    router = Router()
    polls = LoadPolls(router, "router", period=0.01)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(polls.stop)
        stages = [await stack.enter_async_context(staged(settings)) for _ in range(2)]
        async with listening(stages[0].app) as stays:
            async with listening(stages[1].app) as leaves:
                polls.set_boxes({"stays": stays, "leaves": leaves}, {})
                await until(lambda: len(polls.living) == 2)
                rows = await rows_of(polls)
                assert [(row["name"], row["kind"], row["url"]) for row in rows] == [
                    ("stays", "both", stays), ("leaves", "both", leaves),
                ]  # fmt: skip
                assert {*rows[0]["report"]["models"]} >= {CHAT_MODEL, EMBED_MODEL}
                assert rows[0]["report"]["owners"]["llm"]["free"] > 0
            await until(lambda: polls.living == {"stays"})
            assert [row["report"] is None for row in await rows_of(polls)] == [False, True]


async def rows_of(polls: LoadPolls) -> list[dict]:
    async with client(page(polls.states())) as http:
        answer = await http.get("/fleet/boxes", headers=ADMIN)
        return answer.json()["boxes"]


async def test_prometheus_finds_each_box_on_its_own_port(http: httpx.AsyncClient) -> None:
    answer = await http.get("/fleet/targets", headers={"authorization": "Bearer metrics"})
    assert answer.json() == [
        {"targets": ["10.0.0.1:30000"], "labels": {"kind": "both", "__metrics_path__": "/metrics"}},
        {"targets": ["10.0.0.2:30000"], "labels": {"kind": "both", "__metrics_path__": "/metrics"}},
        {
            "targets": ["10.0.0.3:30001"],
            "labels": {"kind": "search", "__metrics_path__": "/-tandem/search/metrics"},
        },
    ]


@pytest.mark.parametrize("path", ["boxes", "targets"])
async def test_both_need_their_keys(http: httpx.AsyncClient, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer other"}):
        answer = await http.get(f"/fleet/{path}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_without_configured_keys_the_addresses_are_open_and_the_reports_closed() -> None:
    async with client(page(server=ServerSection())) as http:
        assert (await http.get("/fleet/targets")).status_code == 200
        answer = await http.get("/fleet/boxes", headers=ADMIN)
        assert answer.status_code == 403
        assert answer.json()["error"]["message"].startswith("/fleet/boxes is disabled because no admin key")


@pytest.mark.parametrize("name", ["", *FLEET_MEDIA_TYPES])
async def test_the_files_are_served_with_a_strict_policy(http: httpx.AsyncClient, name: str) -> None:
    answer = await http.get(f"/fleet/{name}")
    assert answer.text == (FOLDER / (name or "fleet.html")).read_text(encoding="utf-8")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")


async def test_the_files_refer_only_to_each_other() -> None:
    for name in ("fleet.html", "fleet.js"):
        text = (FOLDER / name).read_text(encoding="utf-8")
        found = re.findall(r"""(?:src|href)="([^"#]+)"|from "\./([^"]+)";""", text)
        assert {one or other for one, other in found} <= {*FLEET_MEDIA_TYPES, "data:,"}
        assert re.search(r"https?:|innerHTML|<style|\sstyle=|\son\w+=", text) is None


async def test_other_paths_lead_to_the_page_or_are_named(http: httpx.AsyncClient) -> None:
    answer = await http.get("/fleet")
    assert (answer.status_code, answer.headers["location"]) == (307, "fleet/")
    answer = await http.get("/fleet/steer.js")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
