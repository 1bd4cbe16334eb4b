"""What is counted as ours is what this process does."""

import subprocess
import sys
import time

from benchmark_control_plane.common.machine_load import CpuSnapshot, cpu_snapshot, others_cores


def test_our_own_work_is_ours():
    before = cpu_snapshot()
    start = time.process_time()
    while time.process_time() - start < 0.3:
        pass
    after = cpu_snapshot()
    assert after.ours - before.ours >= 0.25
    assert after.ours - before.ours <= after.busy - before.busy + 0.1


def test_what_a_child_did_stays_ours_when_it_has_ended():
    before = cpu_snapshot()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert cpu_snapshot().ours - before.ours >= 0.25


def test_the_rest_is_others():
    assert others_cores(CpuSnapshot(0.0, 10.0, 1.0), CpuSnapshot(2.0, 14.0, 2.0)) == 1.5
    assert others_cores(CpuSnapshot(0.0, 10.0, 1.0), CpuSnapshot(2.0, 11.0, 3.0)) == 0.0
