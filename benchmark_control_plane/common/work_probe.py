"""Measures how fast the machine is during a run: the CPU time of a small piece of work, once a second.

It runs in a process of its own, so that it delays no request of the load generator. Standard output has one
time in milliseconds a line, at least one, until standard input is closed.

    python -m benchmark_control_plane.common.work_probe
"""

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmark_control_plane.common.machine_load import piece_of_work_ms

_PERIOD_SECONDS = 1.0
# A piece takes 2 ms: 0.2 % of a core.
_PARTS = 10


def main() -> int:
    """Prints a time, and more until standard input is closed."""
    while True:
        print(_PARTS * piece_of_work_ms(_PARTS), flush=True)
        if select.select([sys.stdin], [], [], _PERIOD_SECONDS)[0]:
            return 0


@contextmanager
def probed_work() -> Iterator[list[float]]:
    """Gives a list that has the times of the work of `fixed_work_ms`, in ms, after the block."""
    command = [sys.executable, "-m", "benchmark_control_plane.common.work_probe"]
    found: list[float] = []
    pipe = subprocess.PIPE
    # An interrupt at the terminal does not reach its session; it ends with its standard input.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as probe:
        try:
            yield found
        finally:
            output, _ = probe.communicate()
            found += map(float, output.split())


if __name__ == "__main__":
    raise SystemExit(main())
