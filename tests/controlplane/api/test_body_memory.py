"""Bodies that are read, and requests that wait or run, are bounded together, a tenant's by half of that."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any

import httpx
import pytest

from controlplane.api.settings import ApiKey, ApiSettings, BodyLimits
from controlplane.service.request_jobs import Caller
from tests.controlplane.api.example_bodies import EMBED
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage, staged, until

TENANTS = ("one", "other", "third")
# What the requests of `body_of` take besides the characters of their bodies.
OVERHEAD = 596
LIMITS = BodyLimits(inline_body=1_000, body_memory=40_000)
SETTINGS = ApiSettings(
    api_keys=tuple(ApiKey(sha256(name.encode()).hexdigest(), Caller(name, None)) for name in TENANTS),
    limits=LIMITS,
)


def body_of(size: int) -> bytes:
    body = b'{"model":"%b","input":"hi"' % EMBED_MODEL.encode()
    return body + b" " * (size - len(body) - 1) + b"}"


class SlowUpload:
    """A request whose client sends the first part of its body at once, and the rest after `finish`."""

    def __init__(self, stage: Stage, tenant: str, size: int) -> None:
        self._body = body_of(size)
        self._is_read, self._may_finish = asyncio.Event(), asyncio.Event()
        self._answer = asyncio.create_task(send(stage, tenant, self._chunks()))

    async def _chunks(self) -> AsyncIterator[bytes]:
        yield self._body[:-1]
        # The server asks for more.
        self._is_read.set()
        await self._may_finish.wait()
        yield self._body[-1:]

    async def begun(self) -> "SlowUpload":
        await self._is_read.wait()
        return self

    async def finish(self) -> httpx.Response:
        self._may_finish.set()
        return await self._answer


async def send(stage: Stage, tenant: str, body: bytes | AsyncIterator[bytes]) -> httpx.Response:
    return await stage.http.post(EMBED, content=body, headers={"authorization": f"Bearer {tenant}"})


async def status(stage: Stage, tenant: str, size: int) -> int:
    return (await send(stage, tenant, body_of(size))).status_code


@asynccontextmanager
async def uploading(stage: Stage, *uploads: tuple[str, int]) -> AsyncIterator[None]:
    begun = [await SlowUpload(stage, tenant, size).begun() for tenant, size in uploads]
    yield
    assert [(await upload.finish()).status_code for upload in begun] == [200] * len(begun)


async def test_a_tenant_has_half_of_the_memory():
    async with staged(SETTINGS) as stage:
        async with uploading(stage, ("one", 15_000)):
            refused = await send(stage, "one", body_of(10_000))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert refused.headers["retry-after"] == "1"
            assert "body_memory=40,000" in refused.json()["error"]["message"]
            assert await status(stage, "one", 4_000) == 200
            assert await status(stage, "other", 19_000) == 200
        assert await status(stage, "one", 19_000) == 200
        metrics = (await stage.http.get("/metrics")).text
        assert "tandem_requests_shed_total 1.0" in metrics


async def test_all_tenants_together_have_the_memory():
    async with staged(SETTINGS) as stage, uploading(stage, ("one", 19_000), ("other", 15_000)):
        assert await status(stage, "other", 4_000) == 200
        async with uploading(stage, ("other", 4_000)):
            assert await status(stage, "other", 2_000) == 429


async def test_the_only_body_of_a_tenant_is_always_read():
    async with staged(SETTINGS) as stage, uploading(stage, ("one", 19_000), ("other", 19_000)):
        assert await status(stage, "third", 39_000) == 200


async def test_small_bodies_are_not_counted():
    async with staged(SETTINGS) as stage, uploading(stage, ("one", 20_000)):
        assert await status(stage, "one", LIMITS.inline_body - OVERHEAD) == 200
        assert await status(stage, "one", LIMITS.inline_body - OVERHEAD + 1) == 429


async def test_a_request_that_is_refused_or_left_holds_nothing():
    async with staged(SETTINGS) as stage:
        upload = await SlowUpload(stage, "one", 19_000).begun()
        upload._answer.cancel()
        await asyncio.gather(upload._answer, return_exceptions=True)
        refused = await send(stage, "one", body_of(19_000)[:-1])
        assert refused.status_code == 400
        async with uploading(stage, ("one", 2_000)):
            assert await status(stage, "one", 17_000) == 200


RERANK = "/v1/rerank"
SMALL = {RERANK: {"query": "q", "documents": ["d"]}, EMBED: {"model": EMBED_MODEL, "input": "d"}}


@pytest.mark.parametrize(
    ("path", "large"),
    [
        # These have 2,440 tokens, which take 19,520 bytes.
        (RERANK, {"query": "q" * 60, "documents": ["d"] * 40}),
        (EMBED, {"input": ["d" * 61] * 40}),
        # These are cut to 64 tokens.
        (RERANK, {"query": "q", "documents": ["d" * 12_000]}),
        (EMBED, {"input": "d" * 12_000, "truncate_prompt_tokens": -1}),
        # Three hundred numbers of 1,200 bytes of text, which take 40 bytes each.
        (EMBED, {"input": [[300] * 60] * 5}),
    ],
)
async def test_embeddings_and_pairs_that_wait_are_counted_with_their_bodies(
    path: str, large: dict[str, object]
):
    """A tenant has memory for one of the large ones."""
    large, small = SMALL[path] | large, SMALL[path]

    async def ask(stage: Stage, tenant: str, body: dict[str, object]) -> httpx.Response:
        return await stage.http.post(path, json=body, headers={"authorization": f"Bearer {tenant}"})

    async with staged(SETTINGS, is_stepped=True) as stage:
        worker = stage.reranker if path == RERANK else stage.embedder
        first = asyncio.create_task(ask(stage, "one", large))
        await until(lambda: bool(worker.live))
        async with asyncio.timeout(5):
            assert (await ask(stage, "one", large)).json()["error"]["code"] == "overloaded"
        others = [asyncio.create_task(ask(stage, *sent)) for sent in (("one", small), ("other", large))]
        await until(lambda: len(stage.service.gate.tickets()) == 3)
        while not all(task.done() for task in (first, *others)):
            worker.allow(1)
            await asyncio.sleep(0)
        assert [task.result().status_code for task in (first, *others)] == [200, 200, 200]
        again = asyncio.create_task(ask(stage, "one", large))
        await until(lambda: bool(worker.live))
        worker.allow(1)
        assert (await again).status_code == 200


HEAD = {"model": CHAT_MODEL, "max_tokens": 3}
MESSAGES = HEAD | {"messages": [{"role": "user", "content": "x" * 100}]}
GENERATIONS = {
    "/v1/chat/completions": MESSAGES,
    "/v1/messages": MESSAGES,
    "/v2/chat": MESSAGES,
    "/v1/responses": {"model": CHAT_MODEL, "input": "x" * 100},
    "/v1/completions": HEAD | {"prompt": ["x" * 100] * 2},
}


async def second_is_refused(stage: Stage, path: str, body: dict[str, Any]) -> None:
    """Checks that a tenant may have one such request at a time, while another tenant may have one, too."""

    def ask(tenant: str) -> asyncio.Task[httpx.Response]:
        headers = {"authorization": f"Bearer {tenant}"}
        return asyncio.create_task(stage.http.post(path, json=body, headers=headers))

    runs, prompts = stage.generator.runs, len(body["prompt"]) if "prompt" in body else 1
    begun = [ask("one")]
    await until(lambda: len(runs) == prompts)
    async with asyncio.timeout(5):
        refused = await ask("one")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "body_memory" in refused.text
    assert "tandem_requests_shed_total 1.0" in (await stage.http.get("/metrics")).text
    begun += [ask("other")]
    await until(lambda: len(runs) == 2 * prompts)
    while not all(task.done() for task in begun):
        stage.generator.allow(1)
        await asyncio.sleep(0)
    begun += [ask("one")]
    await until(lambda: len(runs) == 3 * prompts)
    stage.generator.allow(3)
    assert [(await task).status_code for task in begun] == [200, 200, 200]


@pytest.mark.parametrize("path", GENERATIONS)
async def test_prompts_that_wait_or_run_are_counted(path: str):
    """Each has 800 bytes of tokens at least, and the body besides."""
    limits = BodyLimits(inline_body=700, body_memory=5_000)
    async with staged(replace(SETTINGS, limits=limits), is_stepped=True) as stage:
        await second_is_refused(stage, path, GENERATIONS[path])


async def test_what_a_parsed_body_takes_is_counted():
    """Two hundred empty objects take 400 bytes in the body, but not in memory."""
    limits = BodyLimits(inline_body=5_000, body_memory=60_000)
    message = {"role": "user", "content": "hi", "annotations": [{}] * 200}
    async with staged(replace(SETTINGS, limits=limits), is_stepped=True) as stage:
        await second_is_refused(stage, "/v1/chat/completions", HEAD | {"messages": [message]})


@pytest.mark.parametrize("faulty", [{"x-slo-ttft-ms": "fast"}, {"x-request-id": "no spaces"}])
async def test_a_request_with_a_faulty_header_holds_nothing(faulty: dict[str, str]):
    async with staged(SETTINGS) as stage:
        for _ in range(3):
            headers = {"authorization": "Bearer one", **faulty}
            answer = await stage.http.post(EMBED, content=body_of(15_000), headers=headers)
            assert answer.status_code == 400
        assert await status(stage, "one", 15_000) == 200
