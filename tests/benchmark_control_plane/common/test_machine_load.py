"""Tests of the CPU accounting between the benchmark and other processes, and of the machine's speed."""

import subprocess
import sys
import time
from itertools import accumulate

import pytest

from benchmark_control_plane.common import machine_load
from benchmark_control_plane.common.machine_load import (
    CpuSnapshot,
    cpu_snapshot,
    fixed_work_ms,
    others_cores,
    raised_session,
    set_session_nice,
)
from benchmark_control_plane.common.work_probe import probed_work


def test_own_work_is_not_counted_as_others():
    before = cpu_snapshot()
    start = time.process_time()
    while time.process_time() - start < 0.3:
        pass
    after = cpu_snapshot()
    assert after.ours - before.ours >= 0.25
    assert after.ours - before.ours <= after.busy - before.busy + 0.1


def test_work_of_a_finished_child_counts_as_own():
    before = cpu_snapshot()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert cpu_snapshot().ours - before.ours >= 0.25


def test_remaining_cpu_time_is_that_of_others():
    assert others_cores(CpuSnapshot(0.0, 10.0, 1.0), CpuSnapshot(2.0, 14.0, 2.0)) == 1.5
    assert others_cores(CpuSnapshot(0.0, 10.0, 1.0), CpuSnapshot(2.0, 11.0, 3.0)) == 0.0


def test_one_slow_piece_of_work_is_no_slow_machine(monkeypatch):
    # The CPU clock before and after each of five pieces.
    clock = accumulate([0.0, 0.02, 1.0, 0.03, 1.0, 0.9, 1.0, 0.02, 1.0, 0.03])
    monkeypatch.setattr(machine_load.time, "thread_time", lambda: next(clock))
    assert fixed_work_ms() == pytest.approx(30.0)


def test_the_probe_gives_a_time_for_each_second_of_the_block():
    with probed_work() as found:
        assert found == []
    assert len(found) >= 1 and all(took > 0.0 for took in found)


@pytest.mark.parametrize(("before", "within"), [("5", "-10"), ("-3", "-13")])
def test_a_session_leads_new_ones_in_the_block_and_has_its_former_level_after_it(tmp_path, before, within):
    file = tmp_path / "autogroup"
    file.write_text(f"/autogroup-9 nice {before}\n", encoding="ascii")
    with raised_session(10, file):
        assert file.read_text(encoding="ascii") == within
    assert file.read_text(encoding="ascii") == before


@pytest.mark.parametrize("content", [None, ""], ids=["no autogroups", "the machine's first session"])
def test_without_autogroups_no_level_is_written(tmp_path, content):
    file = tmp_path / "autogroup"
    if content is not None:
        file.write_text(content, encoding="ascii")
    with raised_session(10, file):
        assert (file.read_text(encoding="ascii") if file.exists() else None) == content
    assert (file.read_text(encoding="ascii") if file.exists() else None) == content


def test_a_niceness_without_effect_is_an_error(tmp_path, monkeypatch):
    file = tmp_path / "9" / "autogroup"
    set_session_nice(9, 19, tmp_path)
    file.parent.mkdir()
    file.write_text("/autogroup-9 nice 0\n", encoding="ascii")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(file), "write_text", refuse)
    with pytest.raises(RuntimeError, match=r"Permission denied; a niceness of 19 has no effect"):
        set_session_nice(9, 19, tmp_path)
    monkeypatch.setattr(type(file), "write_text", lambda *_, **__: 0)
    with pytest.raises(RuntimeError, match=r"the nice value is 0; a niceness of 19 has no effect"):
        set_session_nice(9, 19, tmp_path)
