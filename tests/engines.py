"""Small real vLLM engines for tests, identical on every machine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from backends.vllm.client import VllmGenerator
from backends.vllm.grammar_limits import GrammarLimits
from backends.vllm.hybrid.support import HybridSetup
from controlplane.core.generation import ChatPrompt, Delta, Handoff, Sampling
from controlplane.core.request import Request
from controlplane.policy.engine.options import EngineOptions
from tests import example_requests

BLOCK_TOKENS = 32
BLOCKS = 64

# The whole KV cache is 4 MiB, so that tests can fill it; no compilation, so that it starts sooner.
TINY_ARGUMENTS: dict[str, Any] = {
    "block_size": BLOCK_TOKENS,
    "num_gpu_blocks_override": BLOCKS,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}

_numbers = count()


@asynccontextmanager
async def running_vllm(
    model: str = "tandem/tiny-llama",
    *,
    lora_modules: dict[str, str] | None = None,
    tool_parser: str | None = None,
    tool_strictness: str = "auto",
    reasoning_parser: str | None = None,
    scheduling: EngineOptions | None = None,
    hybrid: HybridSetup | None = None,
    grammars: GrammarLimits | None = None,
    stall_seconds: float = 300.0,
    **arguments: Any,
) -> AsyncIterator[VllmGenerator]:
    """A started engine on the CPU; `arguments` override those of TINY_ARGUMENTS."""
    generator = VllmGenerator(
        model,
        engine_arguments=TINY_ARGUMENTS | arguments,
        lora_modules=lora_modules,
        tool_parser=tool_parser,
        tool_strictness=tool_strictness,
        reasoning_parser=reasoning_parser,
        scheduling=scheduling,
        hybrid=hybrid,
        grammars=grammars,
        stall_seconds=stall_seconds,
    )
    await generator.start()
    try:
        yield generator
    finally:
        await generator.stop()


def a_request(prompt: list[int], sampling: Sampling) -> Request:
    name = f"request-{next(_numbers)}"
    return example_requests.a_request(
        name, len(prompt), sampling.max_tokens, model="tiny", sequences=sampling.n
    )


async def complete(
    generator: VllmGenerator,
    prompt: str | list[int],
    sampling: Sampling,
    chat: ChatPrompt | None = None,
    *,
    done: int = 0,
) -> list[Delta]:
    tokens = await generator.tokenize(prompt) if isinstance(prompt, str) else prompt
    request, handoff = a_request(tokens, sampling), Handoff(resumed_tokens=done)
    return [d async for d in generator.generate(request, tokens, sampling, chat, handoff=handoff)]


def text_of(deltas: list[Delta], index: int = 0) -> str:
    return "".join(d.text for d in deltas if d.index == index)


def tokens_of(deltas: list[Delta], index: int = 0) -> list[int]:
    return [token for d in deltas if d.index == index for token in d.token_ids]
