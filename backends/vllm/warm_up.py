"""Warms up an engine before it serves: runs the paths that compile or load at their first use.

vLLM compiles the computation of log probabilities at the first request for them, which took 4 to 46 s, and
again for the first batch of more than one row; grammars load their compiler at the first structured output;
the first steps with prompts of a size take several times as long as later ones. Every other request would
wait meanwhile, and a time model that learns from such steps predicts that longer prompts miss their
objective.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.core.generation import Sampling
from controlplane.core.start_stages import note

if TYPE_CHECKING:
    from backends.vllm.engine import VllmEngine

WARM_UP_LIMIT_SECONDS = 180.0
_TOKENS = 2
_PROMPT = "Hello there, how are you?"
_PROMPT_LENGTHS = (32, 128, 512, 2_048)
_WORDS = (
    "A prompt of some length is made of these words in turn, each time beginning with another one of them."
)
_LEARNING_LIMIT_SECONDS = 20.0
_ALONE = Sampling(_TOKENS, temperature=0.0, ignore_eos=True)
# The prompt's log probabilities are many rows, one sample is one row, and two samples are two.
_PATHS = {
    "logprobs": Sampling(_TOKENS, temperature=0.0, logprobs=1, prompt_logprobs=1, ignore_eos=True),
    "samples": Sampling(_TOKENS, temperature=1.0, top_p=0.9, top_k=10, n=2, logprobs=1, ignore_eos=True),
    "structured output": Sampling(_TOKENS, structure={"type": "json_object"}),
}


async def warm_up(engine: "VllmEngine", model: str, *, limit_seconds: float = WARM_UP_LIMIT_SECONDS) -> None:
    """Generates one token, then runs each path and notes its time; what the engine refuses is left out.

    The last path computes prompts of several lengths. Paths that do not end within `limit_seconds` are
    aborted: their first request will wait.

    Raises BackendDown, with the path's name, if the engine dies, and if it does not generate the one token.
    """
    prompt = list(engine.tokenizer.encode(_PROMPT))
    done: list[str] = []
    count = await _run(engine, prompt[:1], Sampling(1, temperature=0.0, ignore_eos=True))
    if count != 1:
        raise BackendDown(f"the engine of {model} generated {count} tokens instead of 1")
    try:
        async with asyncio.timeout(limit_seconds):
            for name, sampling in _PATHS.items():
                before = time.monotonic()
                try:
                    result = await _outcome(engine, prompt, sampling)
                except BackendDown as error:
                    raise BackendDown(f"the warm-up of {name} for {model} failed: {error}") from error
                done.append(f"{name} {result or f'{time.monotonic() - before:.1f} s'}")
            before = time.monotonic()
            for prompt in _prompts(engine, turn=0):
                await _outcome(engine, prompt, _ALONE)
            done.append(f"prompts {time.monotonic() - before:.1f} s")
    except TimeoutError:
        done.append(f"the rest not within {limit_seconds:g} s")
    note(", ".join(done))


async def learn_step_times(engine: "VllmEngine") -> None:
    """Computes other prompts of the same lengths beside a decoding request, for the scheduler's time model.

    Without them it knows only what a roofline says until requests come. Takes at most 20 s. Raises
    BackendDown.
    """
    decoding = Sampling(engine.max_model_tokens - 1, temperature=0.0, ignore_eos=True)
    prompt = list(engine.tokenizer.encode(_PROMPT))[:1]
    # The scheduler times only steps that follow each other.
    async with aclosing(engine.generate("learning", prompt, decoding, None)) as deltas:
        with suppress(TimeoutError, Refused, BackendFailed):
            async with asyncio.timeout(_LEARNING_LIMIT_SECONDS):
                await anext(deltas, None)
                for prompt in _prompts(engine, turn=1):
                    await _run(engine, prompt, _ALONE)


def _prompts(engine: "VllmEngine", *, turn: int) -> Iterator[list[int]]:
    """A prompt of each length that a step can compute; none begins as another one of any turn does."""
    words = list(engine.tokenizer.encode(_WORDS))
    longest = min(engine.config.scheduler_config.max_num_batched_tokens, engine.max_model_tokens - _TOKENS)
    for number, length in enumerate(_PROMPT_LENGTHS):
        first = turn * len(_PROMPT_LENGTHS) + number
        if length <= longest:
            yield [words[(first + at) % len(words)] for at in range(length)]


async def _outcome(engine: "VllmEngine", prompt: list[int], sampling: Sampling) -> str | None:
    """Runs one path; returns why it is not available, or None."""
    try:
        await _run(engine, prompt, sampling)
    except (Refused, BackendFailed) as error:
        return f"not available ({error})"
    return None


async def _run(engine: "VllmEngine", prompt: list[int], sampling: Sampling) -> int:
    """The number of tokens generated."""
    name = f"warm-up-{time.monotonic_ns()}"
    async with aclosing(engine.generate(name, prompt, sampling, None)) as deltas:
        return sum([len(delta.token_ids) async for delta in deltas])
