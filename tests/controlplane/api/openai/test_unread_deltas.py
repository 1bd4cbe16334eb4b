"""What the answers to several prompts hold for a client that reads slowly."""

import asyncio

from controlplane.api.openai.buffered import UnreadDeltas
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
