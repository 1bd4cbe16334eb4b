"""Physical memory per mode: elastic, and set through the shared segment with kvcached."""

import fcntl
import multiprocessing
import struct
import threading
import uuid
from pathlib import Path

import pytest

from backends.device.kv_memory import (
    SEGMENTS,
    ElasticMemory,
    KvcachedMemory,
    KvLimit,
    kvcached_segment,
    kvcached_unit,
)
from controlplane.core.device import LimitConflict
from controlplane.core.engine_reports import EngineState

MIB = 2**20
UNIT = kvcached_unit(layers=2)


def engine(*, total: int, ceded: int) -> EngineState:
    return EngineState(
        used_bytes=total - ceded, total_bytes=total, running=1, waiting=0, preemptions=0, ceded_bytes=ceded
    )


@pytest.fixture
def segment():
    """A segment as kvcached creates it: a file of three int64 in /dev/shm."""
    path = SEGMENTS / f"tandem-test-{uuid.uuid4().hex}"
    path.write_bytes(struct.pack("=qqq", 64 * MIB, 24 * MIB, 8 * MIB))
    yield path
    path.unlink()


def test_elastic_memory_gives_ceded_bytes_to_the_workspace():
    memory = ElasticMemory(pool_bytes=1_000, kv_bytes=900)
    assert memory.workspace_room(engine(total=900, ceded=0)) == 100
    assert memory.workspace_room(engine(total=900, ceded=300)) == 400


def test_limits_are_read_and_written_in_the_format_of_kvcached(segment):
    memory = KvcachedMemory(segment, pool_bytes=64 * MIB, unit_bytes=UNIT)
    assert memory.read() == KvLimit(64 * MIB, 24 * MIB, 8 * MIB)
    memory.limit_llm(30 * MIB)
    # Rounded up to a unit of 2 pages of 2 MiB in 2 layers; the engine alone writes the used bytes.
    assert struct.unpack("=qqq", segment.read_bytes()) == (32 * MIB, 24 * MIB, 8 * MIB)
    assert memory.revision == 1


def test_the_original_limit_is_never_restored_exactly(segment):
    memory = KvcachedMemory(segment, pool_bytes=64 * MIB, unit_bytes=UNIT)
    memory.limit_llm(32 * MIB)
    memory.limit_llm(64 * MIB)
    assert memory.read().total == 64 * MIB - UNIT == memory.max_llm_bytes


def test_workspace_excludes_bytes_that_are_still_mapped(segment):
    memory = KvcachedMemory(segment, pool_bytes=64 * MIB, unit_bytes=UNIT)
    memory.limit_llm(16 * MIB)
    # The limit is 16 MiB, but 32 are mapped, and the engine still holds 40.
    assert memory.workspace_room(engine(total=64 * MIB, ceded=24 * MIB)) == 24 * MIB
    assert memory.workspace_room(engine(total=64 * MIB, ceded=60 * MIB)) == 32 * MIB
    segment.write_bytes(struct.pack("=qqq", 16 * MIB, 4 * MIB, 0))
    assert memory.workspace_room(engine(total=64 * MIB, ceded=60 * MIB)) == 48 * MIB


def test_a_limit_changed_by_another_process_raises(segment):
    memory = KvcachedMemory(segment, pool_bytes=64 * MIB, unit_bytes=UNIT)
    memory.limit_llm(32 * MIB)
    segment.write_bytes(struct.pack("=qqq", 48 * MIB, 0, 0))
    with pytest.raises(LimitConflict, match="revision 1"):
        memory.limit_llm(40 * MIB)


def _report_use(path: str, has_lock: object, may_write: object) -> None:
    """Does the work of kvcached's tracker in the engine's process, when `may_write` is set."""
    with Path(path).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        total, _, _ = struct.unpack("=qqq", file.read(24))
        has_lock.set()
        may_write.wait(30)
        file.seek(0)
        file.write(struct.pack("=qqq", total, 12 * MIB, 4 * MIB))
        file.flush()


def test_the_lock_preserves_the_numbers_of_both_processes(segment):
    """The engine's process holds the lock and writes its use while the limit is being set."""
    memory = KvcachedMemory(segment, pool_bytes=64 * MIB, unit_bytes=UNIT)
    context = multiprocessing.get_context("spawn")
    has_lock, may_write = context.Event(), context.Event()
    other = context.Process(target=_report_use, args=(str(segment), has_lock, may_write))
    other.start()
    assert has_lock.wait(30)
    setting = threading.Thread(target=memory.limit_llm, args=(32 * MIB,))
    setting.start()
    setting.join(0.2)
    assert setting.is_alive(), "limit_llm must wait for the lock"
    may_write.set()
    setting.join(30)
    other.join(30)
    assert (other.exitcode, memory.read()) == (0, KvLimit(32 * MIB, 12 * MIB, 4 * MIB))


def test_a_missing_segment_is_reported_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.delenv("KVCACHED_IPC_NAME", raising=False)
    with pytest.raises(ValueError, match=r"KVCACHED_IPC_NAME is not set.*or use static"):
        kvcached_segment(tmp_path)
    monkeypatch.setenv("KVCACHED_IPC_NAME", "tandem")
    with pytest.raises(ValueError, match=r"no segment .*tandem.*or use static"):
        kvcached_segment(tmp_path)
    (tmp_path / "tandem").write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes instead of 24"):
        KvcachedMemory(kvcached_segment(tmp_path), pool_bytes=1, unit_bytes=1)
