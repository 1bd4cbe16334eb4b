"""Measures the time that the scheduler plug-in adds to a vLLM step (1,000 waiting, 256 running requests).

    python -m benchmark_control_plane.experiments.engine.plugin_cost

A real EngineCore without a model, whose scheduler writes the shared state as it does behind the gate.
*slots*: 256 requests run because `max_num_seqs` allows no more. *memory*: as many may run, but the blocks
do not suffice for all to grow, so a request is preempted or held back every few steps. One request arrives
before each step; above 1,000 waiting requests, random ones are aborted, so that some waiting requests can
still meet their SLO. Each request carries the metadata that the gate sends: class, objectives and length
quantiles. With `--shared-prefix` each request belongs to one of eight groups, which share so many tokens of
their prompts through vLLM's prefix cache.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from statistics import median, quantiles
from time import perf_counter_ns
from typing import Any

from backends.vllm.plugin.request_metadata import KEY, metadata_of
from backends.vllm.plugin.shared_state import open_shared_state
from backends.vllm.simulation.stepped_engine import SteppedEngine, SteppedEngineSetup
from benchmark_control_plane.common.results_file import add_results, write_or_print
from controlplane.core.clock import Instant, milliseconds
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import Handoff
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.registry import ENGINE_POLICIES
from predictors.output_length.history_predictor import HistoryQuantiles

_PROMPT = 100
_LIMIT = 1_024
_GROUPS = 8
_CLASSES = [
    ServiceClass(name, Slo(ttft=milliseconds(ttft_ms), tpot=milliseconds(100)), priority, sheddable=False)
    for name, ttft_ms, priority in (("interactive", 1_000, 2), ("standard", 10_000, 1), ("batch", 100_000, 0))
]
# More steps than the longest output, since the first requests all start together.
_SETTLING_STEPS = 700


def measure(
    engine: SteppedEngine,
    tandem: Mapping[str, Any] | None,
    *,
    waiting: int,
    settling: int,
    steps: int,
    shared: int = 0,
) -> dict[str, float]:
    """Microseconds per step of the hook and of vLLM's own part, and medians of the batch and queue sizes.

    `preempted` is the number of preemptions in the measured steps, which follow `settling` others.
    """
    with open_shared_state():
        scheduler = engine.restart(tandem=tandem)
    durations: list[int] = []
    hooks: list[int] = []
    preempted: list[int] = []
    counts: list[tuple[int, int]] = []
    inner, preempt = scheduler.schedule, scheduler._preempt_request

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter_ns()
        output = inner(*args, **kwargs)
        durations.append(perf_counter_ns() - start)
        # vLLM's own scheduler has no hook.
        hooks.append(0 if tandem is None else scheduler.hook_ns)
        return output

    def counted(*args: Any, **kwargs: Any) -> None:
        preempted.append(len(durations))
        preempt(*args, **kwargs)

    scheduler.schedule, scheduler._preempt_request = timed, counted
    added, random = 0, Random(1)
    while len(durations) < settling + steps:
        added = _add(engine, added, shared)
        while len(scheduler.waiting) < waiting:
            added = _add(engine, added, shared)
        _trim(engine, waiting, random)
        counts.append((len(scheduler.running), len(scheduler.waiting)))
        engine.step()
    hook, whole = hooks[settling:], durations[settling:]
    own = [total - part for total, part in zip(whole, hook, strict=True)]
    return {
        "hook_median_us": median(hook) / 1e3,
        "hook_p99_us": quantiles(hook, n=100)[-1] / 1e3,
        "vllm_median_us": median(own) / 1e3,
        "running": median(running for running, _ in counts[settling:]),
        "waiting": median(waited for _, waited in counts[settling:]),
        "preempted": sum(at >= settling for at in preempted),
    }


def _trim(engine: SteppedEngine, most: int, random: Random) -> None:
    """Aborts random waiting requests above `most`."""
    queue = [request.request_id for request in engine.core.scheduler.waiting]
    if len(queue) > most:
        engine.abort(random.sample(sorted(queue), len(queue) - most))


def _output_tokens(number: int) -> int:
    return 300 + number * 137 % 400


def _request(number: int, now: Instant, shared: int = 0) -> Request:
    service_class, prompt = _CLASSES[number % len(_CLASSES)], shared + _PROMPT + number * 13 % 100
    return Request(
        f"r{number}", Kind.GENERATE, "model", "tenant", service_class, service_class.slo, now, prompt, _LIMIT
    )


@cache
def _forecast() -> LengthForecast:
    """The gate's forecast after a full window of such outputs."""
    predictor, request = HistoryQuantiles(), _request(0, Instant(0))
    for number in range(512):
        predictor.observe(request, _output_tokens(number))
    return predictor.forecast(request)


def _add(engine: SteppedEngine, number: int, shared: int) -> int:
    request = _request(number, Instant(engine.now_ns), shared)
    metadata = metadata_of(request, Handoff(forecast=_forecast()))
    own = request.prompt_tokens - shared
    # Without a prefix cache the token ids do not matter.
    prompt = [number % _GROUPS + 3] * shared + Random(number).choices(range(20, 2_000), k=own)
    engine.add(request.id, 0, _output_tokens(number), extra={KEY: metadata}, limit=_LIMIT, prompt=prompt)
    return number + 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark_control_plane.experiments.engine.plugin_cost", description=__doc__
    )
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1_000)
    parser.add_argument("--steps", type=int, default=400, help="steps that are measured")
    parser.add_argument("--settling", type=int, default=_SETTLING_STEPS, help="steps before those")
    parser.add_argument("--shared-prefix", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--orderings", nargs="*", default=sorted(ENGINE_POLICIES))
    add_results(parser)
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, dict[str, float]]] = {}
    shared = options.shared_prefix
    # Each group's prefix is in the cache once, as far as it fills whole blocks.
    prefixes = _GROUPS * shared // 16
    setups = {
        regime: SteppedEngineSetup(
            blocks=blocks + prefixes,
            max_running=options.running,
            max_step_tokens=8_192,
            shares_prefixes=shared > 0,
        )
        for regime, blocks in (("slots", 20_000), ("memory", options.running * 22))
    }
    for regime, setup in setups.items():
        engine = SteppedEngine(setup)
        variants: dict[str, Mapping[str, Any] | None] = {"stock": None}
        variants |= {name: {"ordering": name} for name in options.orderings}
        for name, tandem in variants.items():
            row = measure(
                engine,
                tandem,
                waiting=options.waiting,
                settling=options.settling,
                steps=options.steps,
                shared=shared,
            )
            found.setdefault(regime, {})[name] = row
            print(
                f"{regime:7} {name:12} hook {row['hook_median_us']:6.0f} us (p99 {row['hook_p99_us']:6.0f}), "
                f"vLLM's own {row['vllm_median_us']:6.0f} us; {row['running']:.0f} running, "
                f"{row['waiting']:.0f} waiting, {row['preempted']:.0f} preempted",
                flush=True,
            )
    write_or_print(options.results, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
