"""Bulk embedding of texts that the server refuses one by one: the others are embedded."""

from itertools import count, pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane import sdk
from controlplane.api.settings import ApiSettings, BodyLimits
from controlplane.sdk.bulk_embedding import BulkEmbedding, EmbeddedBatch
from controlplane.sdk.errors import api_error
from controlplane.sdk.replies import embeddings
from tests.controlplane.api.scripted_server import EMBED_MODEL, listening, staged
from tests.controlplane.sdk.scripted_http import BOTH, Server, vectors
from tests.controlplane.sdk.test_embed_many import AT_ONCE, embed_all

BAD = ("", "too long")


def refused(texts: list[str]) -> httpx.Response:
    found = f"input: item {[text in BAD for text in texts].index(True)} is invalid; change it"
    error = {"message": found, "type": "invalid_request_error", "param": "input", "code": "invalid_value"}
    return httpx.Response(400, json={"error": error})


def reply(_: str, body: Any) -> Any:
    texts = body["input"]
    if any(text in BAD for text in texts):
        return refused(texts)
    return vectors([[float(text)] for text in texts], len(texts))


def numbers_of(batches: list[EmbeddedBatch]) -> list[int]:
    """The numbers of the embedded texts, each with its own vector and in order."""
    for batch in batches:
        assert batch.stop == batch.start + len(batch.vectors)
        np.testing.assert_array_equal(batch.vectors, [[float(text)] for text in batch.texts])
    found = [number for batch in batches for number in range(batch.start, batch.stop)]
    assert found == sorted(set(found))
    return found


@BOTH
async def test_texts_that_the_server_refuses_are_left_out_and_named(is_async: bool):  # noqa: FBT001
    texts = [BAD[at % 2] if at in (0, 33, 34, 90, 199) else str(at) for at in range(200)]
    server, named = Server(reply), dict[int, sdk.BadRequest]()
    found = await embed_all(is_async, server, texts, batch_tokens=20, on_refused=named.__setitem__)
    assert numbers_of(found) == [at for at in range(200) if at not in (0, 33, 34, 90, 199)]
    assert sorted(named) == [0, 33, 34, 90, 199]
    assert all(isinstance(error, sdk.BadRequest) for error in named.values())


@BOTH
@pytest.mark.parametrize("bad", BAD)
async def test_without_a_handler_the_error_names_the_text_after_all_texts_before_it(is_async, bad):
    texts = [str(at) for at in range(200)]
    texts[57] = bad
    before: list[EmbeddedBatch] = []
    with pytest.raises(sdk.BadRequest) as caught:
        await embed_all(is_async, Server(reply), texts, into=before, batch_tokens=30)
    assert numbers_of(before) == list(range(57))
    assert caught.value.__notes__ == [f"embed_many: text 57, {bad!r}"]
    after = await embed_all(is_async, Server(reply), texts, batch_tokens=30, start=58)
    assert numbers_of(after) == list(range(58, 200))


@BOTH
async def test_half_of_a_surrogate_pair_is_named_after_the_texts_before_it(is_async: bool):  # noqa: FBT001
    texts = [*map(str, range(57)), "broken \ud83d", "58"]
    before: list[EmbeddedBatch] = []
    with pytest.raises(UnicodeEncodeError) as caught:
        await embed_all(is_async, Server(reply), texts, into=before, batch_tokens=5)
    assert numbers_of(before) == list(range(57))
    assert caught.value.__notes__ == ["embed_many: text 57"]


@pytest.mark.parametrize("batch_tokens", [8_192, 1_000_000])
async def test_the_served_application_refuses_as_the_client_divides(batch_tokens: int):
    """By the field, or by the size of the body, which is refused unread."""
    texts = ["a", "", "b " * 9_000, "c", "d" * 300_000, "e"]
    named: list[int] = []
    settings = ApiSettings(limits=BodyLimits(max_body=100_000))
    async with staged(settings) as stage, listening(stage.app) as url, sdk.AsyncTandem(url) as tandem:
        found = [
            batch.texts
            async for batch in tandem.embed_many(
                texts,
                model=EMBED_MODEL,
                batch_tokens=batch_tokens,
                on_refused=lambda number, _: named.append(number),
            )
        ]
    assert [text for batch in found for text in batch] == ["a", "c", "e"]
    assert sorted(named) == [1, 2, 4]


@BOTH
async def test_a_text_that_fits_into_no_memory_is_named_and_not_repeated_for_ever(is_async: bool):  # noqa: FBT001
    error = {"message": "m", "type": "server_error", "param": "input", "code": "out_of_memory"}
    calls = count()

    def reply(_: str, body: Any) -> Any:
        assert next(calls) < 200
        if "57" not in body["input"]:
            return vectors([[float(text)] for text in body["input"]], len(body["input"]))
        return httpx.Response(503, json={"error": error}, headers={"retry-after-ms": "1"})

    texts, named = [str(at) for at in range(200)], dict[int, sdk.ApiError]()
    found = await embed_all(is_async, Server(reply), texts, batch_tokens=20, on_refused=named.__setitem__)
    assert numbers_of(found) == [at for at in range(200) if at != 57]
    assert [(at, type(error), error.code) for at, error in named.items()] == [
        (57, sdk.ServiceUnavailable, "out_of_memory")
    ]
    with pytest.raises(sdk.ServiceUnavailable) as caught:
        await embed_all(is_async, Server(reply), texts, batch_tokens=20, start=50)
    assert caught.value.__notes__ == ["embed_many: text 57, '57'"]


@BOTH
async def test_a_text_of_which_workers_die_is_sent_alone_once(is_async: bool):  # noqa: FBT001
    error = {"message": "m", "type": "server_error", "param": None, "code": "worker_died"}
    deadly: list[int] = []

    def reply(_: str, body: Any) -> Any:
        if "57" not in body["input"]:
            return vectors([[float(text)] for text in body["input"]], len(body["input"]))
        deadly.append(len(body["input"]))
        assert len(deadly) < 20
        return httpx.Response(503, json={"error": error}, headers={"retry-after-ms": "1"})

    texts, named = [str(at) for at in range(200)], dict[int, sdk.ApiError]()
    found = await embed_all(is_async, Server(reply), texts, batch_tokens=20, on_refused=named.__setitem__)
    assert numbers_of(found) == [at for at in range(200) if at != 57]
    assert [(at, error.code) for at, error in named.items()] == [(57, "worker_died")]
    # Of half the size each time.
    assert deadly[-1] == 1 and all(later <= -(-size // 2) for size, later in pairwise(deadly))


def test_blank_texts_take_about_one_call_each():
    """A column with blank cells is divided at them, not halved once for each."""
    texts = ["" if at % 10 == 9 else str(at) for at in range(100)]
    server = Server(reply)
    with sdk.Tandem(transport=server, retries=AT_ONCE) as tandem:
        found = list(tandem.embed_many(texts, model="e", on_refused=lambda *_: None))
    assert len(numbers_of(found)) == 90
    # The whole, ten runs of texts and ten blanks.
    assert len(server.requests) == 21


@given(
    texts=st.lists(st.sampled_from(["1", "2", *BAD]), max_size=60),
    max_concurrency=st.integers(1, 9),
    batch_tokens=st.integers(1, 30),
    overloaded=st.integers(2, 5),
)
def test_each_text_is_embedded_or_named_once(texts, max_concurrency, batch_tokens, overloaded):
    named: list[int] = []
    run = BulkEmbedding(
        texts,
        "e",
        {},
        AT_ONCE,
        0,
        batch_tokens,
        max_concurrency,
        None,
        lambda number, _: named.append(number),
    )
    found: list[EmbeddedBatch] = []
    calls, now = count(1), 0.0
    while not run.is_complete:
        due = list(run.due(now))
        assert due or run.wait_s(now) is not None or run.is_complete
        for batch, _ in due:
            answer = reply("", {"input": batch.texts})
            if next(calls) % overloaded == 0:
                answer = httpx.Response(429, json={"error": {"message": "m", "type": "t"}})
            if not isinstance(answer, httpx.Response):
                outcome: Any = embeddings(httpx.Response(200, json=answer))
            else:
                outcome = api_error(answer.status_code, answer.content, answer.headers)
            run.settle(batch, outcome, now)
        found += run.finished()
        now += 1.0
    assert sorted([*numbers_of(found), *named]) == list(range(len(texts)))
    assert sorted(named) == [at for at, text in enumerate(texts) if text in BAD]


@BOTH
async def test_a_wait_of_no_time_does_not_repeat_a_batch_for_ever(is_async: bool):  # noqa: FBT001
    error = {"message": "m", "type": "server_error", "param": None, "code": "busy"}
    server = Server(lambda _, body: httpx.Response(503, json={"error": error}, headers={"retry-after": "0"}))
    with pytest.raises(sdk.ServiceUnavailable):
        await embed_all(is_async, server, ["a"], sdk.Retries(most=3, first_wait_s=0))
    assert len(server.requests) == 4
