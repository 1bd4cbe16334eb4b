"""Measures what a load report costs a box, to make, to attach and in bytes, and what a choice costs a router.

A simulated box holds the stated numbers of live requests, of two classes; up to 256 run, the others wait in
the engine. A timer makes a report every 50 ms of virtual time, and answers that are 7 ms apart carry it.
Figures are the CPU time of single calls in microseconds on this machine, so that other programs count little.

    python -m benchmark_control_plane.experiments.fleet.report_cost [--results FILE]
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from backends.cost_models.step_time import affine, embedding_line, llm_only, sequential
from benchmark_control_plane.common.command_line import BadInput, print_json
from benchmark_control_plane.common.results_file import add_results
from benchmark_control_plane.simulator.distinct_prompts import prompt_ids
from benchmark_control_plane.simulator.simulated_machine import Machine, engines
from benchmark_control_plane.simulator.simulation import config_of, started
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.generation import Sampling
from controlplane.fleet.load_report import LoadReport, ModelLoad, OwnerLoad, parse_report
from controlplane.fleet.router import RoutedRequest, Router
from controlplane.service.request_jobs import Caller, RequestHints, RequestOrigin
from controlplane.service.service import Service

_LIVE = (0, 16, 64, 256, 1_000)
_BETWEEN_ANSWERS_S = 0.007
_BOXES = (8, 1_000)
_CLASSES = {
    "interactive": {"ttft_ms": 600_000, "tpot_ms": 1_000, "priority": 1, "default": True},
    "batch": {"ttft_ms": 1_200_000},
}
_MACHINE = Machine(sequential(llm_only(affine(5e-3, 33e-6, 3e-5, 4e-8)), embedding_line(5e-3, 1e-5)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    add_results(parser)
    options = parser.parse_args(arguments)

    def command() -> dict[str, object]:
        if options.calls < 10:
            raise BadInput(f"--calls {options.calls}: must be at least 10")
        return {
            "by_live_requests": [run(_costs(live, options.calls)) for live in _LIVE],
            "choose_us_by_boxes": {boxes: _choosing(boxes, options.calls) for boxes in _BOXES},
        }

    return print_json(command, options.results)


async def _costs(live: int, calls: int) -> dict[str, object]:
    config = config_of({"classes": _CLASSES}, has_pool=False)
    generator, embedder = engines(_MACHINE, lambda request: request.max_output_tokens, config)
    async with started(generator, embedder, _MACHINE, config) as service:
        asked = [asyncio.create_task(_ask(service, number)) for number in range(live)]
        await asyncio.sleep(4.0)
        reporter = service.load_reporter
        text = reporter.text()
        cost = {
            "live": len(service.gate.tickets()),
            "bytes": len(text),
            "make_us": _timed(lambda: reporter.report().body(), calls),
            "attach_us": await _timed_apart(reporter.text, calls),
            "read_by_router_us": _timed(lambda: parse_report(text), calls),
        }
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return cost


async def _ask(service: Service, number: int) -> None:
    hints = RequestHints(service_class=("interactive", "batch")[number % 2])
    job = await service.intake.completion(
        RequestOrigin(f"{number}", Caller("team"), hints),
        "simulated",
        prompt_ids(number, 200, group=0, shared=0),
        max_tokens=3_000,
        sampling=Sampling(max_tokens=3_000),
    )
    async for _ in await service.gate.generate(job):
        pass


def _choosing(boxes: int, calls: int) -> dict[str, float]:
    """Time in which a router chooses one of so many boxes."""
    router, draws = Router(), Random(1)
    load = OwnerLoad({"interactive": 0.04}, 0.03, 2**33)
    report = LoadReport("a", 1, 0.0, {"chat": ModelLoad("llm", 3e-5, 131_072)}, {"llm": load})
    for box in range(boxes):
        router.add(str(box))
        router.heard(str(box), report, 0.0)
    request = RoutedRequest("chat", "interactive", 900, 0.5)
    router.choose(request, 0.0, (0.0, 0.0))
    return _timed(lambda: router.choose(request, 0.1, (draws.random(), draws.random())), calls)


def _timed(call: Callable[[], object], calls: int) -> dict[str, float]:
    """Median and 0.99 quantile of the CPU time of a call, in microseconds."""
    return _quantiles([_microseconds(call) for _ in range(calls)])


async def _timed_apart(call: Callable[[], object], calls: int) -> dict[str, float]:
    """The same of calls between which virtual time passes, and timers run."""
    took = []
    for _ in range(calls):
        await asyncio.sleep(_BETWEEN_ANSWERS_S)
        took.append(_microseconds(call))
    return _quantiles(took)


def _microseconds(call: Callable[[], object]) -> float:
    begin = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - begin) / 1e3


def _quantiles(took: Sequence[float]) -> dict[str, float]:
    return {f"p{round(100 * level)}": round(float(np.quantile(took, level)), 1) for level in (0.5, 0.99)}


if __name__ == "__main__":
    raise SystemExit(main())
