"""LoRA adapters with seeded weights on the tiny Llama: each changes the output, and only of its requests."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends.bundled_models import resolve
from backends.vllm.client import VllmGenerator
from controlplane.core.errors import BackendDown
from controlplane.core.generation import Sampling
from controlplane.policy.engine.options import EngineOptions
from tests.engines import a_request, running_vllm, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

PROMPT = list(range(5, 75))
SAMPLING = Sampling(max_tokens=8, temperature=0)
RANK = 8
# In bfloat16 the greedy choice of a random model depends on the size of the batch.
LORA = {"enable_lora": True, "max_lora_rank": RANK, "enable_prefix_caching": True, "dtype": "float32"}


def adapter(folder: Path, seed: int) -> str:
    """A PEFT adapter of the attention's queries and values."""
    import torch
    from safetensors.torch import save_file

    model = json.loads((Path(resolve("tandem/tiny-llama")) / "config.json").read_text(encoding="utf-8"))
    width, draw = model["hidden_size"], torch.Generator().manual_seed(seed)
    outputs = {"q_proj": width, "v_proj": model["num_key_value_heads"] * model["head_dim"]}
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, width, generator=draw)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, RANK, generator=draw)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(outputs),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    return str(folder)


async def generated(generator: VllmGenerator, name: str | None) -> tuple[tuple[int, ...], int]:
    """The tokens of the prompt's continuation, and how many of the prompt were cached."""
    request = replace(a_request(PROMPT, SAMPLING), adapter=name)
    deltas = [delta async for delta in generator.generate(request, PROMPT, SAMPLING)]
    return tuple(tokens_of(deltas)), max(delta.cached_tokens for delta in deltas)


async def test_each_adapter_has_outputs_and_a_cache_of_its_own(tmp_path):
    modules = {"poet": adapter(tmp_path / "poet", 1), "clerk": adapter(tmp_path / "clerk", 2)}
    async with running_vllm(
        lora_modules=modules, scheduling=EngineOptions(), max_loras=3, **LORA
    ) as generator:
        alone = {name: await generated(generator, name) for name in (None, "poet", "clerk")}
        assert len({tokens for tokens, _ in alone.values()}) == 3
        assert [cached for _, cached in alone.values()] == [0, 0, 0]
        names = [None, "poet", "clerk"] * 4
        together = await asyncio.gather(*(generated(generator, name) for name in names))
    assert [tokens for tokens, _ in together] == [alone[name][0] for name in names]
    assert {cached for _, cached in together} == {64}


@pytest.mark.slow
async def test_adapter_that_does_not_load_stops_the_start(tmp_path):
    with pytest.raises(ValueError, match=r"lora_modules\.poet='.*missing': vLLM does not load it"):
        async with running_vllm(lora_modules={"poet": str(tmp_path / "missing")}, max_loras=2, **LORA):
            pass


async def test_cpu_needs_an_empty_slot():
    from backends.vllm.lora_adapters import load_adapters

    llm: Any = SimpleNamespace(vllm_config=SimpleNamespace(lora_config=SimpleNamespace(max_loras=1)))
    with pytest.raises(ValueError, match=r"engine\.max_loras=1: on a CPU vLLM needs more slots than the 1"):
        await load_adapters(llm, {"poet": "adapters/poet"}, nullcontext)


async def test_an_engine_that_hangs_in_loading_has_a_call_until_it_is_killed():
    from backends.vllm.lora_adapters import load_adapters

    calls = 0

    @contextmanager
    def call() -> Iterator[None]:
        nonlocal calls
        calls += 1
        try:
            yield
        finally:
            calls -= 1

    outputs: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    hanging = asyncio.get_running_loop().create_future()
    llm: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(lora_config=None),
        _run_output_handler=lambda: None,
        output_handler=outputs,
        add_lora=lambda adapter: hanging,
    )
    loading = asyncio.create_task(load_adapters(llm, {"poet": "adapters/poet"}, call))
    await asyncio.sleep(0.01)
    assert calls == 1 and not loading.done()
    # So ends the task that reads the outputs of an engine that the watchdog has killed.
    outputs.cancel()
    with pytest.raises(BackendDown, match="died while it loaded the adapter poet"):
        await loading
    assert calls == 0
