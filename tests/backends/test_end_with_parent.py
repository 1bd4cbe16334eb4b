"""A child ends with its parent even if that is killed, whichever way it was started."""

import os
import select
import signal
import subprocess
import sys

import pytest

from backends.supervision import end_with_parent

PARENT = """
import multiprocessing, sys, time
from backends.supervision import end_with_parent

def child(told):
    end_with_parent()
    told.send(None)
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    heard, told = context.Pipe()
    one = context.Process(target=child, args=(told,))
    one.start()
    heard.recv()
    print(one.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_parent_leaves_no_child(tmp_path, method: str):
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert not select.select([child], [], [], 0)[0]
            parent.send_signal(signal.SIGKILL)
            assert select.select([child], [], [], 10)[0], "it is still there"
        finally:
            os.close(child)


def test_one_without_a_parent_is_told():
    with pytest.raises(RuntimeError, match="was not started by multiprocessing"):
        end_with_parent()
