"""What is counted as ours is what this process does."""

import subprocess
import sys
import time

from benchmark_control_plane.common.machine_load import Moment, look, others_cores


def test_our_own_work_is_ours():
    before = look()
    start = time.process_time()
    while time.process_time() - start < 0.3:
        pass
    after = look()
    assert after.ours - before.ours >= 0.25
    assert after.ours - before.ours <= after.busy - before.busy + 0.1


def test_what_a_child_did_stays_ours_when_it_has_ended():
    before = look()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert look().ours - before.ours >= 0.25


def test_the_rest_is_others():
    assert others_cores(Moment(0.0, 10.0, 1.0), Moment(2.0, 14.0, 2.0)) == 1.5
    assert others_cores(Moment(0.0, 10.0, 1.0), Moment(2.0, 11.0, 3.0)) == 0.0
