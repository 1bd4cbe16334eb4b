"""What does watching the device's memory cost? Share of a core at each sampling interval.

The service's own monitor on an otherwise idle event loop, over this process and one child; the loop's cost
without it is subtracted.

    python -m benchmark_control_plane.sampling_cost [--seconds 5]
"""

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Sequence

import uvloop

from backends.device import open_probe
from benchmark_control_plane.inputs import BadInput, exit_code
from controlplane.service.memory_monitor import MemoryMonitor

INTERVALS_MS = (10, 100)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args(arguments)

    def command() -> dict[str, float]:
        if options.seconds <= 0:
            raise BadInput(f"--seconds {options.seconds}: a measurement needs a time above 0")
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        child.start()
        try:
            idle = _share_of_core(None, options.seconds)
            return {
                f"cpu_percent_at_{every}_ms": 100 * (_share_of_core(every, options.seconds) - idle)
                for every in INTERVALS_MS
            }
        finally:
            child.kill()

    return exit_code(command)


def _share_of_core(every_ms: int | None, seconds: float) -> float:
    async def run() -> float:
        monitor = None
        if every_ms is not None:
            monitor = MemoryMonitor(open_probe(), lambda: 2**40, lambda _: None, 2**20)
            monitor.start(every_ms / 1_000)
        start = time.process_time()
        await asyncio.sleep(seconds)
        used = time.process_time() - start
        if monitor is not None:
            monitor.stop()
        return used / seconds

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


if __name__ == "__main__":
    raise SystemExit(main())
