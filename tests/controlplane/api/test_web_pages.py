"""CORS, the version and the creation time of models."""

import time

import pytest

from controlplane import __version__
from controlplane.config import ConfigError, parse
from tests.controlplane.api.scripted_server import EMBED_MODEL, Stage, staged

ORIGIN = "https://app.example.com"


async def test_a_page_of_a_listed_origin_may_call_and_read_our_headers():
    async with staged(server={"cors": [ORIGIN]}) as stage:
        asked = await stage.http.options(
            "/v1/rerank",
            headers={
                "origin": ORIGIN,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,x-slo-e2e-ms",
            },
        )
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == ORIGIN
        assert "x-slo-e2e-ms" in asked.headers["access-control-allow-headers"]
        ask = {"model": EMBED_MODEL, "input": "hi"}
        answer = await stage.http.post("/v1/embeddings", json=ask, headers={"origin": ORIGIN})
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "x-tandem-decision" in answer.headers["access-control-expose-headers"]
        failed = await stage.http.post("/v1/embeddings", json={}, headers={"origin": ORIGIN})
        assert (failed.status_code, failed.headers["access-control-allow-origin"]) == (400, ORIGIN)
        other = await stage.http.post("/v1/embeddings", json=ask, headers={"origin": "https://else.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_without_the_setting_no_page_may_read_an_answer(stage: Stage):
    answer = await stage.http.get("/v1/models", headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["app.example.com", "https://app.example.com/", "ftp://app.example.com"])
def test_an_origin_is_a_scheme_and_a_host(origin: str):
    with pytest.raises(ConfigError, match=r"server\.cors\.0"):
        parse({"models": {"chat": {"model": "m"}}, "server": {"cors": [origin]}})


async def test_version_and_creation_time(stage: Stage):
    assert (await stage.http.get("/version")).json() == {"version": __version__}
    first, second = [(await stage.http.get("/v1/models")).json()["data"][0]["created"] for _ in range(2)]
    assert first == second
    assert abs(time.time() - first) < 3_600
