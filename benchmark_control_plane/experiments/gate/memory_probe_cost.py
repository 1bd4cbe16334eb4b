"""Measures the CPU cost of the memory monitor at each sampling interval, in percent of one core.

The service's own monitor runs on an otherwise idle event loop and watches this process and one child; a bare
timer gives the cost of waking that loop. Both alternate in several rounds; medians.

    python -m benchmark_control_plane.experiments.gate.memory_probe_cost [--seconds 3] [--rounds 5]
"""

import argparse
import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from statistics import median

import uvloop

from backends.device.probe import open_probe
from benchmark_control_plane.common.command_line import BadInput, print_json
from controlplane.service.memory.monitor import MemoryMonitor

_INTERVALS_MS = (10, 100)

Stop = Callable[[], None]
Watch = Callable[[float], Stop]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)

    def command() -> dict[str, object]:
        if options.seconds <= 0:
            raise BadInput(f"--seconds {options.seconds}: must be above 0")
        if options.rounds < 1:
            raise BadInput(f"--rounds {options.rounds}: must be at least 1")
        cells = [(name, watch, every) for every in _INTERVALS_MS for name, watch in _WATCHES.items()]
        found: dict[str, list[float]] = {f"{name}_{every}_ms": [] for name, _, every in cells}
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(86_400,))
        child.start()
        try:
            for number in range(options.rounds):
                for name, watch, every in cells if number % 2 == 0 else cells[::-1]:
                    share = _share_of_core(watch, every / 1_000, options.seconds)
                    found[f"{name}_{every}_ms"].append(100 * share)
        finally:
            child.kill()
        percent = {name: round(median(shares), 3) for name, shares in found.items()}
        return {"rounds": options.rounds, "cores": os.cpu_count(), "percent_of_a_core": percent}

    return print_json(command)


def _monitored(every: float) -> Stop:
    monitor = MemoryMonitor(open_probe(), lambda: 2**40, lambda _: None, 2**20)
    monitor.start(every)
    return monitor.stop


def _timed(every: float) -> Stop:
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def read_and_reschedule() -> None:
        nonlocal timer
        timer = loop.call_later(every, read_and_reschedule)

    def stop() -> None:
        timer.cancel()

    timer = loop.call_later(every, read_and_reschedule)
    return stop


_WATCHES: dict[str, Watch] = {"monitor": _monitored, "timer": _timed}


def _share_of_core(watch: Watch, every: float, seconds: float) -> float:
    async def run() -> float:
        stop = watch(every)
        start = time.process_time()
        await asyncio.sleep(seconds)
        used = time.process_time() - start
        stop()
        return used / seconds

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


if __name__ == "__main__":
    raise SystemExit(main())
