"""What answers hold for a client that reads slowly, and that they end nevertheless."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from controlplane.api.errors import Problem
from controlplane.api.openai import buffered
from controlplane.api.openai.buffered import ReadAhead, UnreadDeltas
from controlplane.core.generation import Delta, TokenLogprob


async def collected(deltas: UnreadDeltas) -> list[Delta]:
    return [delta async for delta in deltas]


def token(number: int) -> Delta:
    return Delta(number % 2, f"{number} ", (number,), logprobs=(TokenLogprob(f"{number} ", -1.0),))


async def test_what_is_not_read_is_one_delta_for_each_choice():
    deltas = UnreadDeltas(jobs=1)
    deltas.put(Delta(0, "", (), cached_tokens=7, prompt_logprobs=(None, TokenLogprob("a", -2.0))))
    for number in range(1_000):
        deltas.put(token(number))
    deltas.put(Delta(1, "", (), finish_reason="stop", stop_reason="x"))
    deltas.job_ended()
    assert len(deltas) == 2
    even, odd = await collected(deltas)
    assert even.text == "".join(f"{number} " for number in range(0, 1_000, 2))
    assert odd.token_ids == tuple(range(1, 1_000, 2))
    assert [entry.token for entry in odd.logprobs] == [f"{number} " for number in odd.token_ids]
    assert (even.cached_tokens, len(even.prompt_logprobs), even.finish_reason) == (7, 2, None)
    assert (odd.finish_reason, odd.stop_reason) == ("stop", "x")


async def test_a_reader_that_keeps_up_gets_each_delta_and_the_end():
    deltas = UnreadDeltas(jobs=2)
    reading = asyncio.create_task(collected(deltas))
    for number in range(6):
        deltas.put(token(number))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    deltas.job_ended()
    await asyncio.sleep(0)
    assert not reading.done()
    deltas.job_ended()
    assert [delta.token_ids for delta in await reading] == [(number,) for number in range(6)]


class Answer:
    """Fifty tokens, then the error if there is one; `end` is set when all were read."""

    def __init__(self, error: Exception | None = None) -> None:
        self.end = asyncio.Event()
        self._deltas = self._tokens(error)

    async def _tokens(self, error: Exception | None) -> AsyncIterator[Delta]:
        for number in range(50):
            await asyncio.sleep(0)
            yield Delta(0, f"{number} ", (number,))
        self.end.set()
        if error is not None:
            raise error
        await asyncio.sleep(0)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas


def read_ahead(answer: Any) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
    return ReadAhead(answer).started()


@pytest.mark.parametrize("error", [None, ValueError("a defect")])
async def test_an_answer_is_read_to_its_end_although_its_reader_has_stopped(monkeypatch, error):
    monkeypatch.setattr(buffered, "_LOOK_SECONDS", 0.01)
    answer, text = Answer(error), ""

    async def read() -> str:
        nonlocal text
        async with read_ahead(answer) as ahead:
            async for delta in ahead:
                text += delta.text
                if not answer.end.is_set():
                    await answer.end.wait()
        return text

    reading = asyncio.create_task(read())
    async with asyncio.timeout(5):
        if error is None:
            await reading
        else:
            with pytest.raises(ValueError, match="a defect"):
                await reading
    assert text == "".join(f"{number} " for number in range(50))


async def test_a_reader_that_leaves_ends_the_reading_ahead(monkeypatch):
    monkeypatch.setattr(buffered, "_LOOK_SECONDS", 0.0)
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[Delta]:
        yield Delta(0, "a", (1,))
        begun.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(5):
        async with read_ahead(endless()) as ahead:
            async for _ in ahead:
                await begun.wait()
                break
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_a_reader_that_keeps_up_is_not_read_ahead_of(monkeypatch):
    monkeypatch.setattr(buffered, "_LOOK_SECONDS", 0.0)
    async with read_ahead(Answer()) as ahead:
        found = [delta.text async for delta in ahead]
    assert len(found) == 50


async def test_a_reader_that_takes_nothing_after_the_end_is_told_so(monkeypatch):
    monkeypatch.setattr(buffered, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(buffered, "_MOST_SECONDS", 0.05)
    with pytest.raises(Problem) as caught:
        async with asyncio.timeout(5), read_ahead(Answer()) as ahead:
            async for _ in ahead:
                await asyncio.Event().wait()
    assert caught.value.failure.code == "client_too_slow"


def test_parts_of_different_kinds_are_not_merged():
    deltas = UnreadDeltas(jobs=1)
    for delta in (
        Delta(0, "", (1,), reasoning="a"),
        Delta(0, "", (2,), reasoning="b"),
        Delta(0, "c", (3,)),
        Delta(0, "d", (4,)),
        Delta(0, "", (5,), tool_calls=({"index": 0},)),
        Delta(0, "e", (6,)),
    ):
        deltas.put(delta)
    assert len(deltas) == 4
