"""Warms up an engine before it serves: runs the paths that compile or load at their first use.

vLLM compiles the computation of log probabilities at the first request for them, which took 4 to 46 s, and
again for the first batch of more than one row; grammars load their compiler at the first structured output.
Every other request would wait meanwhile.
"""

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.core.generation import Sampling
from controlplane.core.start_stages import note

if TYPE_CHECKING:
    from backends.vllm.engine import VllmEngine

WARM_UP_LIMIT_SECONDS = 180.0
_TOKENS = 2
_PROMPT = "Hello there, how are you?"
# The prompt's log probabilities are many rows, one sample is one row, and two samples are two.
_PATHS = {
    "logprobs": Sampling(_TOKENS, temperature=0.0, logprobs=1, prompt_logprobs=1, ignore_eos=True),
    "samples": Sampling(_TOKENS, temperature=1.0, top_p=0.9, top_k=10, n=2, logprobs=1, ignore_eos=True),
    "structured output": Sampling(_TOKENS, structure={"type": "json_object"}),
}


async def warm_up(engine: "VllmEngine", model: str, *, limit_seconds: float = WARM_UP_LIMIT_SECONDS) -> None:
    """Generates one token, then runs each path and notes its time; what the engine refuses is left out.

    Paths that do not end within `limit_seconds` are aborted: their first request will wait.

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
    except TimeoutError:
        done.append(f"the rest not within {limit_seconds:g} s")
    note(", ".join(done))


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
