"""A forked or spawned child exits when its parent is killed."""

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

def child(started):
    end_with_parent()
    started.send(None)
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    receiver, sender = context.Pipe()
    process = context.Process(target=child, args=(sender,))
    process.start()
    receiver.recv()
    print(process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_exits_when_its_parent_is_killed(tmp_path, method: str):
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
            assert select.select([child], [], [], 10)[0], "the child still runs"
        finally:
            os.close(child)


def test_a_process_without_parent_raises():
    with pytest.raises(RuntimeError, match="was not started by multiprocessing"):
        end_with_parent()
