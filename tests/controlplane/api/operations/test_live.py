"""GET /admin/live over HTTP: its key, its cursor, and the samples of a served application."""

import asyncio

import pytest

from tests.controlplane.api.operations.test_admin import ADMIN, SETTINGS
from tests.controlplane.api.scripted_server import CHAT_MODEL, staged


async def test_the_feed_continues_where_the_last_answer_ended():
    async with staged(SETTINGS) as stage:
        await stage.http.post("/v1/completions", json={"model": CHAT_MODEL, "prompt": "x"})
        stage.service.live.sample()
        answer = await stage.http.get("/admin/live", headers=ADMIN)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        found = answer.json()
        assert [one["type"] for one in found["records"]] == ["config", "admission", "end", "sample"]
        assert found["more"] is False
        again = (await stage.http.get(f"/admin/live?since={found['next']}", headers=ADMIN)).json()
        assert again["records"] == [] and again["instance"] == found["instance"]


async def test_the_feed_needs_the_admin_key():
    async with staged(SETTINGS) as stage:
        assert (await stage.http.get("/admin/live")).status_code == 401
    async with staged() as stage:
        answer = await stage.http.get("/admin/live")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_disabled")


@pytest.mark.parametrize("since", ["", "-1", "x", "1.0", "9" * 19, "²", "0x1"])
async def test_a_bad_cursor_is_an_error(since):
    async with staged(SETTINGS) as stage:
        answer = await stage.http.get("/admin/live", params={"since": since}, headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "since")


async def test_a_served_application_takes_samples_by_itself():
    async with staged(SETTINGS) as stage, asyncio.timeout(10):
        sampled = asyncio.Event()
        take = stage.service.live.sample

        def sample() -> None:
            take()
            sampled.set()

        stage.service.live.sample = sample  # type: ignore[method-assign]
        await sampled.wait()
        found = (await stage.http.get("/admin/live", headers=ADMIN)).json()["records"]
        assert "sample" in [one["type"] for one in found]
