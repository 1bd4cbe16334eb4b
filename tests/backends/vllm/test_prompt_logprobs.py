"""Log probabilities of a prompt are converted in slices, to what vLLM makes of them at once."""

import asyncio
from inspect import unwrap
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

POSITIONS, CHUNK = 300, 200


async def test_the_event_loop_runs_between_slices():
    import torch
    from vllm.logprobs import create_prompt_logprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsTensors

    from backends.vllm.prompt_logprobs import convert_prompt_logprobs, defer_prompt_logprobs

    def processor() -> LogprobsProcessor:
        return LogprobsProcessor(
            tokenizer=None, logprobs=None, prompt_logprobs=create_prompt_logprobs(False),
            cumulative_logprob=None, num_logprobs=None, num_prompt_logprobs=2,
        )  # fmt: skip

    def output(logprobs: object) -> SimpleNamespace:
        return SimpleNamespace(prompt_logprobs=logprobs, prompt_token_ids=[1, *token_ids[:, 0].tolist()])

    token_ids = torch.arange(3 * POSITIONS).reshape(POSITIONS, 3)
    tensors = LogprobsTensors(token_ids, -1.0 - token_ids, torch.ones(POSITIONS, dtype=torch.int))
    at_once, in_slices = processor(), processor()
    unwrap(LogprobsProcessor._update_prompt_logprobs)(at_once, tensors)
    defer_prompt_logprobs()
    defer_prompt_logprobs()
    for rows in (slice(CHUNK), slice(CHUNK, None)):
        in_slices._update_prompt_logprobs(LogprobsTensors(*(column[rows] for column in tensors[:3])))
    expected, found, ticks = output(at_once.pop_prompt_logprobs()), output(in_slices.pop_prompt_logprobs()), 0
    assert not in_slices.pop_prompt_logprobs()

    async def count() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    counting = asyncio.create_task(count())
    await convert_prompt_logprobs(found)
    counting.cancel()
    assert ticks >= POSITIONS // 64
    await convert_prompt_logprobs(expected)
    assert found.prompt_logprobs == expected.prompt_logprobs
    assert found.prompt_logprobs[0] is None and len(found.prompt_logprobs) == POSITIONS + 1
