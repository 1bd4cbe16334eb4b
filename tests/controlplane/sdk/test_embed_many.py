"""Bulk embedding: every text once and in order, whatever the server refuses."""

import asyncio
import heapq
import threading
from collections.abc import Iterator
from io import StringIO
from itertools import count
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane import sdk
from controlplane.sdk.bulk_embedding import AdaptiveConcurrency, BulkEmbedding, EmbeddedBatch
from controlplane.sdk.errors import api_error
from controlplane.sdk.replies import embeddings
from tests.controlplane.api.scripted_server import EMBED_MODEL, listening, staged
from tests.controlplane.sdk.scripted_http import BOTH, Server, error, vectors

AT_ONCE = sdk.Retries(first_wait_s=0)


def numbered(how_many: int) -> list[str]:
    return [f"text {number:04d}" for number in range(how_many)]


def embedded(texts: list[str], tokens_per_text: int = 3) -> dict[str, Any]:
    """The vector of "text 7" is [7]."""
    return vectors([[float(text[-4:])] for text in texts], tokens_per_text * len(texts))


async def embed_all(
    is_async: bool,  # noqa: FBT001
    transport: Any,
    texts: Any,
    retries: sdk.Retries = AT_ONCE,
    into: list[EmbeddedBatch] | None = None,
    **options: Any,
) -> list[EmbeddedBatch]:
    found = [] if into is None else into
    if is_async:
        async with sdk.AsyncTandem(transport=transport, retries=retries) as tandem:
            async for batch in tandem.embed_many(texts, model="e", **options):
                found.append(batch)
    else:
        with sdk.Tandem(transport=transport, retries=retries) as blocking:
            for batch in blocking.embed_many(texts, model="e", **options):
                found.append(batch)
    return found


def check_prefix(batches: list[EmbeddedBatch], texts: list[str], start: int = 0) -> int:
    """The number of texts embedded, which are a prefix and have their own vectors."""
    stop = start
    for batch in batches:
        assert batch.start == stop
        stop = batch.stop
        np.testing.assert_array_equal(batch.vectors, [[float(text[-4:])] for text in batch.texts])
    assert [text for batch in batches for text in batch.texts] == texts[start:stop]
    return stop


@BOTH
async def test_any_iterable_is_embedded_in_order(is_async: bool):  # noqa: FBT001
    texts, finished = numbered(500), []
    server = Server(lambda _, body: embedded(body["input"]))
    batches = await embed_all(
        is_async, server, iter(texts), batch_tokens=50, progress=finished.append, service_class="batch"
    )
    assert check_prefix(batches, texts) == 500
    assert sum(finished) == 500
    assert len(finished) == len(batches) > 10
    assert {body["service_class"] for body in server.bodies} == {"batch"}
    assert await embed_all(is_async, server, []) == []


@BOTH
async def test_a_progress_bar_counts_the_texts(is_async: bool):  # noqa: FBT001
    tqdm = pytest.importorskip("tqdm").tqdm
    server = Server(lambda _, body: embedded(body["input"]))
    with tqdm(total=120, file=StringIO()) as bar:
        await embed_all(is_async, server, numbered(120), batch_tokens=50, progress=bar.update)
        assert bar.n == bar.total


@BOTH
async def test_refused_and_lost_batches_are_sent_again(is_async: bool):  # noqa: FBT001
    texts, number = numbered(300), count()

    def reply(_: str, body: Any) -> Any:
        match next(number) % 5:
            case 1:
                return error(429, "overloaded", retry_after_ms="1")()
            case 2:
                return error(503, "backend_down", retry_after_ms="1")()
            case 3:
                raise httpx.ConnectError("refused")
        return embedded(body["input"])

    batches = await embed_all(
        is_async, Server(reply), texts, sdk.Retries(most=100, first_wait_s=0), batch_tokens=30
    )
    assert check_prefix(batches, texts) == 300


@BOTH
async def test_an_error_comes_after_the_earlier_batches_and_start_resumes(is_async: bool):  # noqa: FBT001
    texts, is_broken = numbered(200), True

    def reply(_: str, body: Any) -> Any:
        if is_broken and "text 0120" in body["input"]:
            return error(400, "invalid_value")()
        return embedded(body["input"])

    before: list[EmbeddedBatch] = []
    with pytest.raises(sdk.BadRequest) as caught:
        await embed_all(is_async, Server(reply), texts, into=before, batch_tokens=30)
    stop = check_prefix(before, texts)
    assert 0 < stop <= 120
    assert caught.value.__notes__[0].startswith(f"embed_many: texts {stop} to ")
    is_broken = False
    after = await embed_all(is_async, Server(reply), texts, start=stop, batch_tokens=30)
    assert check_prefix(after, texts, stop) == 200


@BOTH
@pytest.mark.parametrize(
    ("wrong", "kind"), [(None, TypeError), (float("nan"), TypeError), (OSError(), OSError)]
)
@pytest.mark.parametrize("at", [0, 1, 57, 199])
async def test_a_failure_of_the_texts_comes_after_the_texts_before_it(
    is_async: bool,  # noqa: FBT001
    at: int,
    wrong: Any,
    kind: type[Exception],
):
    texts = numbered(200)

    def read() -> Iterator[Any]:
        yield from texts[:at]
        if isinstance(wrong, Exception):
            raise wrong
        yield wrong
        yield from texts[at + 1 :]

    before: list[EmbeddedBatch] = []
    server = Server(lambda _, body: embedded(body["input"]))
    with pytest.raises(kind) as caught:
        await embed_all(is_async, server, read(), into=before, batch_tokens=30)
    assert check_prefix(before, texts) == at
    assert kind is OSError or str(caught.value).startswith(f"text {at} is of type {type(wrong).__name__}")


@BOTH
async def test_failures_that_no_retry_changes_are_raised(is_async: bool):  # noqa: FBT001
    final = error(429, "slo_unattainable", x_should_retry="false")
    with pytest.raises(sdk.SloUnattainable):
        await embed_all(is_async, Server(lambda *_: final()), numbered(3))
    server = Server(lambda *_: error(500, "internal_error")())
    with pytest.raises(sdk.ServerError):
        await embed_all(is_async, server, numbered(3))
    assert len(server.requests) == 3


@BOTH
async def test_invalid_arguments_are_refused_at_the_call(is_async: bool):  # noqa: FBT001
    client = sdk.AsyncTandem() if is_async else sdk.Tandem()
    with pytest.raises(TypeError, match="texts is one string"):
        client.embed_many("text", model="e")
    for name in ("batch_tokens", "max_concurrency"):
        with pytest.raises(ValueError, match=f"{name}=0: should be at least 1"):
            client.embed_many([], model="e", **{name: 0})
    with pytest.raises(ValueError, match="start=-1"):
        client.embed_many([], model="e", start=-1)


async def test_the_served_application():
    texts = [str(number) * (number % 60 + 1) for number in range(400)]
    options = {"model": EMBED_MODEL, "truncate_prompt_tokens": -1}
    limits = {"admission": {"max_waiting": 2}}
    async with staged(**limits) as stage, listening(stage.app) as url, sdk.AsyncTandem(url) as tandem:
        found = [batch async for batch in tandem.embed_many(texts, batch_tokens=600, **options)]
        rows = np.concatenate([batch.vectors for batch in found])
        for at in (0, 57, 399):
            alone = await tandem.embed(texts[at], **options)
            np.testing.assert_array_equal(rows[at], alone.vectors[0])
    assert len(rows) == 400


async def test_leaving_the_loop_early_ends_the_open_calls():
    async with staged(is_stepped=True) as stage, listening(stage.app) as url, sdk.AsyncTandem(url) as tandem:
        batches = tandem.embed_many(numbered(90), model=EMBED_MODEL, batch_tokens=20)
        waiting = asyncio.create_task(anext(batches))
        await stage.embedder.until_runs(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(stage.embedder.runs[0].ended.wait(), 5)
        assert stage.embedder.runs[0].end == "aborted"


def test_the_blocking_loop_ends_without_waiting_for_the_open_calls():
    released, ended = threading.Event(), []

    def reply(_: str, body: Any) -> Any:
        if body["input"][0] > "text 0008":
            ended.append(released.wait(10))
        return embedded(body["input"])

    with sdk.Tandem(transport=Server(reply)) as tandem:
        batches = tandem.embed_many(numbered(90), model="e", batch_tokens=20)
        # Later calls are open when the second batch is yielded.
        assert [next(batches).start, next(batches).start] == [0, 8]
        batches.close()
        assert not ended
        released.set()


# --- without I/O, on a virtual clock -------------------------------------------------------------


def bulk(texts: list[str], **options: Any) -> BulkEmbedding:
    return BulkEmbedding(texts, "e", {}, AT_ONCE, **options)


def refusal(retry_after_ms: int) -> Exception:
    response = error(429, "overloaded", retry_after_ms=str(retry_after_ms))()
    return api_error(response.status_code, response.content, response.headers)


class VirtualServer:
    """Serves `capacity` calls at once, each in `service_s`, and refuses the others, in virtual time."""

    def __init__(self, run: BulkEmbedding, capacity: int, service_s: float, retry_after_ms: int) -> None:
        self.run, self.capacity, self.service_s, self.retry_after_ms = (
            run,
            capacity,
            service_s,
            retry_after_ms,
        )
        self.now = 0.0
        self.refused = self.served = 0
        self.largest = 0
        self._events: list[tuple[float, int, Any, Any]] = []
        self._number = count()
        self._busy = 0
        self._earliest: dict[int, float] = {}

    def play(self) -> list[EmbeddedBatch]:
        found: list[EmbeddedBatch] = []
        while not self.run.is_complete:
            for batch, _ in self.run.due(self.now):
                assert self.now >= self._earliest.get(batch.start, 0.0), "sent before its Retry-After"
                self._take(batch)
            wait_s = self.run.wait_s(self.now)
            ends = self._events[0][0] if self._events else None
            if ends is not None and (wait_s is None or ends <= self.now + wait_s):
                self.now, _, batch, outcome = heapq.heappop(self._events)
                self._settle(batch, outcome)
            elif wait_s is not None:
                self.now += wait_s
            found += self.run.finished()
        assert self._events == []
        return found

    def _take(self, batch: Any) -> None:
        takes = self._busy < self.capacity
        self._busy += takes
        self.largest = max(self.largest, self._busy)
        outcome = refusal(self.retry_after_ms)
        if takes:
            outcome = embeddings(httpx.Response(200, json=embedded(batch.texts)))
        after = self.service_s if takes else 0.001
        heapq.heappush(self._events, (self.now + after, next(self._number), batch, outcome))

    def _settle(self, batch: Any, outcome: Any) -> None:
        if isinstance(outcome, Exception):
            self.refused += 1
            self._earliest[batch.start] = self.now + self.retry_after_ms / 1000
        else:
            self.served += 1
            self._busy -= 1
        self.run.settle(batch, outcome, self.now)


@given(
    how_many=st.integers(0, 300),
    capacity=st.integers(1, 9),
    max_concurrency=st.integers(1, 24),
    batch_tokens=st.integers(1, 40),
    retry_after_ms=st.integers(1, 5_000),
)
def test_none_is_lost_whatever_the_capacity(
    how_many, capacity, max_concurrency, batch_tokens, retry_after_ms
):
    texts = numbered(how_many)
    run = bulk(texts, max_concurrency=max_concurrency, batch_tokens=batch_tokens)
    server = VirtualServer(run, capacity, 0.1, retry_after_ms)
    assert check_prefix(server.play(), texts) == how_many
    assert server.largest <= max_concurrency


@pytest.mark.parametrize("capacity", [1, 2, 5, 12])
def test_throughput_is_near_that_of_the_capacity(capacity: int):
    run = bulk(numbered(6000), max_concurrency=64, batch_tokens=30)
    server = VirtualServer(run, capacity, 0.1, retry_after_ms=100)
    server.play()
    best_s = server.served / capacity * 0.1
    assert server.now <= best_s / 0.95


def test_batches_are_cut_by_the_tokens_that_the_server_counts():
    run = bulk(numbered(4000), batch_tokens=300, max_concurrency=1)
    sizes = []
    for at in range(9):
        ((batch, _),) = run.due(float(at))
        sizes.append(len(batch.texts))
        run.settle(batch, embeddings(httpx.Response(200, json=embedded(batch.texts, 9))), float(at))
        list(run.finished())
    # Nine bytes are estimated as 2.25 tokens, then counted as nine.
    assert sizes[0] == 133
    assert set(sizes[1:]) == {33}


def test_a_text_longer_than_a_batch_is_a_batch_of_its_own():
    run = bulk(["a", "b" * 900, "c"], batch_tokens=100)
    assert [batch.texts for batch, _ in run.due(0.0)] == [["a"], ["b" * 900], ["c"]]


def test_memory_is_bounded_while_the_first_batch_is_refused():
    texts = (f"text {number % 10_000:04d}" for number in count())
    run = BulkEmbedding(texts, "e", {}, AT_ONCE, batch_tokens=3, max_held_bytes=100)
    (first, _), *others = run.due(0.0)
    run.settle(first, refusal(10**9), 0.0)
    held = 0
    for _ in range(100):
        for batch, _ in others:
            held += 4 * len(batch.texts)
            run.settle(batch, embeddings(httpx.Response(200, json=embedded(batch.texts))), 1.0)
        assert list(run.finished()) == []
        others = list(run.due(1.0))
    assert others == []
    assert 100 <= held < 200


def test_one_burst_of_refusals_lowers_the_concurrency_once():
    concurrency = AdaptiveConcurrency(64)
    for _ in range(100):
        concurrency.succeeded()
    assert concurrency.size == 64
    for _ in range(64):
        concurrency.refused(sent_at=1.0, now=2.0)
    assert concurrency.size == 56
    for _ in range(56):
        concurrency.succeeded()
    assert concurrency.size == 56
    concurrency.succeeded()
    assert concurrency.size == 57
    concurrency.refused(sent_at=2.0, now=3.0)
    assert concurrency.size == 49
    for at in range(4, 99):
        concurrency.refused(sent_at=at, now=at)
    assert concurrency.size == 1


def test_no_new_batch_is_sent_between_a_refusal_and_the_next_success():
    run = bulk(numbered(99), batch_tokens=3)
    (first, _), *others = run.due(0.0)
    run.settle(first, refusal(1_000), 0.0)
    assert list(run.due(0.5)) == []
    for batch, _ in others[:2]:
        run.settle(batch, embeddings(httpx.Response(200, json=embedded(batch.texts))), 0.5)
    new = [batch for batch, _ in run.due(0.5)]
    assert new and first not in new
    run.settle(new[0], embeddings(httpx.Response(200, json=embedded(new[0].texts))), 1.3)
    assert next(run.due(1.3))[0] is first
