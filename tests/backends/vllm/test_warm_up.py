"""What the warm-up does with an engine that refuses a path, hangs or dies, without vLLM."""

import asyncio
import re
from types import SimpleNamespace

import pytest

from backends.vllm.warm_up import learn_step_times, warm_up
from controlplane.core.errors import BackendDown, Refused
from controlplane.core.start_stages import STAGE_OBSERVER


class FakeEngine:
    """Generates the tokens asked for; where `fails` is true of the sampling it raises `error`, or hangs."""

    tokenizer = SimpleNamespace(encode=lambda text: list(range(len(text))))
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=1_000))
    max_model_tokens = 600

    def __init__(self, fails, error: Exception | None = None) -> None:
        self.fails, self.error = fails, error
        self.prompts: list[list[int]] = []
        self.open = 0

    async def generate(self, name, prompt, sampling, chat):
        self.prompts.append(prompt)
        self.open += 1
        try:
            async for delta in self._tokens(sampling):
                yield delta
        finally:
            self.open -= 1

    async def _tokens(self, sampling):
        if self.fails(sampling):
            if self.error is None:
                await asyncio.Event().wait()
            raise self.error
        yield SimpleNamespace(token_ids=[7] * sampling.max_tokens)


class Notes(list[str]):
    note = list.append


async def noted(engine: FakeEngine, **options: float) -> str:
    """The line about a warm-up."""
    notes = Notes()
    token = STAGE_OBSERVER.set(notes)
    try:
        await warm_up(engine, "chat", **options)
    finally:
        STAGE_OBSERVER.reset(token)
    [line] = notes
    return line


async def test_an_engine_that_dies_names_the_path():
    """The server ends with this message; the engine's log may be long."""
    engine = FakeEngine(lambda sampling: sampling.prompt_logprobs, BackendDown("it died; its log says why"))
    with pytest.raises(BackendDown, match=r"^the warm-up of logprobs for chat failed: it died; its log"):
        await warm_up(engine, "chat")


async def test_a_path_that_is_refused_is_left_out():
    line = await noted(FakeEngine(lambda sampling: sampling.n == 2, Refused("no samples")))
    assert re.fullmatch(
        r"logprobs \S+ s, samples not available \(no samples\), structured \w+ \S+ s, prompts \S+ s", line
    )


async def test_a_path_that_takes_too_long_is_left_to_its_first_request():
    line = await noted(FakeEngine(lambda sampling: sampling.n == 2), limit_seconds=0.05)
    assert re.fullmatch(r"logprobs \S+ s, the rest not within 0.05 s", line)


async def test_prompts_of_several_lengths_are_computed_and_later_others_that_no_cache_has():
    engine = FakeEngine(lambda sampling: False)
    await warm_up(engine, "chat")
    warmed = [tuple(prompt) for prompt in engine.prompts[-3:]]
    engine.prompts.clear()
    await learn_step_times(engine)
    decoding, *others = (tuple(prompt) for prompt in engine.prompts)
    assert len(decoding) == 1
    assert [len(prompt) for prompt in warmed] == [len(prompt) for prompt in others] == [32, 128, 512]
    # A block of the prefix cache has at least 16 tokens.
    assert len({prompt[:16] for prompt in (*warmed, *others)}) == 6
    assert engine.open == 0


@pytest.mark.parametrize("error", [None, Refused("too long")])
async def test_an_engine_that_refuses_or_hangs_learns_from_its_requests(monkeypatch, error):
    monkeypatch.setattr("backends.vllm.warm_up._LEARNING_LIMIT_SECONDS", 0.05)
    engine = FakeEngine(lambda sampling: sampling.max_tokens == 2, error)
    await learn_step_times(engine)
    assert [len(prompt) for prompt in engine.prompts] == [1, 32]
    assert engine.open == 0
