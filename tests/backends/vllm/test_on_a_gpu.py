"""vLLM's behaviour on a GPU, as far as its code shows it without one."""

import os
from types import SimpleNamespace

import pytest

from backends import bundled_models
from backends.vllm.client import _load_engine

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

GIB = 2**30


def test_an_engine_with_a_given_cache_size_starts_on_a_partly_used_device():
    """By default vLLM demands 92 % of the device, which is not free while an embedding model loads."""
    from vllm.v1.worker.utils import request_memory

    from backends.vllm.arguments import engine_args

    found = SimpleNamespace(total_memory=80 * GIB, free_memory=70 * GIB, device_="cuda:0")
    sized = engine_args(str(bundled_models.ensure_tiny_model()), "name", {"kv_cache_memory_bytes": 40 * GIB})
    request_memory(found, sized)
    left = engine_args(str(bundled_models.ensure_tiny_model()), "name", {})
    with pytest.raises(ValueError, match="Free memory on device"):
        request_memory(found, left)


def test_the_engine_process_is_spawned_not_forked(monkeypatch):
    from vllm.utils.system_utils import get_mp_context

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "put back afterwards")
    del os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
    _load_engine()
    assert get_mp_context().get_start_method() == "spawn"


def test_an_operator_may_choose_fork(monkeypatch):
    """vLLM still spawns where it knows that a fork would fail."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    _load_engine()
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


def test_batch_defaults_are_those_of_vllms_own_server(monkeypatch):
    """On an H100: 8,192 tokens per step and 1,024 requests; other contexts get 2,048 and 128."""
    from vllm.engine.arg_utils import AsyncEngineArgs, current_platform
    from vllm.usage.usage_lib import UsageContext

    from backends.vllm.arguments import CONTEXT

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda: 80 * GIB)
    monkeypatch.setattr(current_platform, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    for numbers in AsyncEngineArgs.get_batch_defaults(world_size=1):
        assert CONTEXT in numbers and numbers[CONTEXT] == numbers[UsageContext.OPENAI_API_SERVER]


@pytest.mark.parametrize(
    ("name", "gibibytes"),
    [
        ("NVIDIA B200", 178), ("NVIDIA H200", 140), ("NVIDIA H100 80GB HBM3", 79),
        ("NVIDIA A100-SXM4-80GB", 79), ("NVIDIA L40S", 44), ("Tesla T4", 15),
    ],
)  # fmt: skip
def test_the_plan_assumes_the_batch_defaults_of_the_engine(monkeypatch, name, gibibytes):
    from vllm.engine.arg_utils import AsyncEngineArgs, current_platform

    from backends.vllm.argument_names import batch_defaults
    from backends.vllm.arguments import CONTEXT

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda: gibibytes * GIB)
    monkeypatch.setattr(current_platform, "get_device_name", lambda: name)
    tokens, sequences = AsyncEngineArgs.get_batch_defaults(world_size=1)
    assert batch_defaults(name, gibibytes * GIB) == (tokens[CONTEXT], sequences[CONTEXT])
