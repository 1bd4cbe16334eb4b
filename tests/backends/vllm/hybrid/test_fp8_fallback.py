"""The fallback for models whose heads share keys: vLLM's keys and values in eight bits."""

import pytest
import torch

from controlplane.core.generation import Sampling
from tests.engines import complete, running_vllm, tokens_of

_BYTES = 1 << 20


@pytest.mark.engine
@pytest.mark.untimed
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "AVX2", reason="vLLM's fp8 cache needs AVX-512"
)
@pytest.mark.slow
async def test_an_eight_bit_cache_has_the_computed_number_of_blocks():
    """The number of blocks follows from the bytes, and the engine generates with them."""
    sizes = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": _BYTES, "max_model_len": 256}
    async with running_vllm(kv_cache_dtype="fp8", **sizes) as generator:
        geometry = generator.geometry
        assert geometry.bytes_per_element == 1
        # One block is vLLM's null block.
        assert generator.kv_bytes // geometry.bytes_per_block + 1 == _BYTES // geometry.bytes_per_block
        prompt = [7 + i for i in range(90)]
        answer = await complete(generator, prompt, Sampling(max_tokens=24, temperature=0.0, ignore_eos=True))
        assert len(tokens_of(answer)) == 24
