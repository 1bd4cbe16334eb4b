"""Measures the overhead of Tandem's HTTP server over vLLM's own, and the time of one admission decision.

Both servers stay up on the same machine with the same model and engine arguments, each with its own
statistics and /metrics, neither with an access log. `vllm bench serve` loads them alternately (A B B A) at
three rates up to saturation; the ratio is taken within each pair, the median over the pairs. The decision is
one scheduling cycle of the gate at 1,000 live requests, including the snapshot; the record is what is kept
of it for /admin/explain.

    python -m benchmark_control_plane.experiments.gate.http_overhead
        [--rounds 5] [--requests 200] [--decision-only]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmark_control_plane.common.distributions import spread
from benchmark_control_plane.common.servers import (
    IN_PROCESS,
    BenchRun,
    Server,
    all_serving,
    bench_serve,
    interrupt_on_sigterm,
    tandem_server,
    vllm_server,
)
from controlplane.core.clock import Duration, Instant, milliseconds, seconds
from controlplane.core.decision import Defer, Reason
from controlplane.core.memory_ledger import Footprint, MemoryLedger
from controlplane.core.pool_view import DecodeLoad, Pace, PoolView, Queue, Share, Waiting
from controlplane.core.request import Kind, Owner, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.gate.admission import Admission, AdmissionOptions, fits_ahead
from controlplane.policy.gate.ordering import EarliestDeadline, OrderingOptions
from controlplane.policy.gate.scheduling_cycle import run_cycle
from controlplane.service.decision_history import Decided, basis_of
from predictors.timing.online_step_time import StepTime, StepWork

ENGINE: dict[str, object] = {
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "block_size": 32,
    "dtype": "bfloat16",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 512 * 2**20,
    **IN_PROCESS,
}
MODEL = "tiny-llama"
_DECISIONS = 500


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--decision-only", action="store_true")
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    report: dict[str, object] = {"decision_us": decision_costs(), "record_us": record_us(1_000)}
    if not options.decision_only:
        report["server_ratios"] = server_ratios(options.rounds, options.requests)
    json.dump(report, sys.stdout, indent=2)
    print()
    return 0


def server_ratios(rounds: int, requests: int) -> dict[str, object]:
    """Ratios Tandem / vLLM at half, nine tenths and all of the rate that vLLM sustains."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = f"tandem/{MODEL}"
        chat = {"model": model, "name": MODEL, "engine": ENGINE}
        config = {"models": {"chat": chat}, "pool": {"memory": "2GiB"}}
        servers = [
            vllm_server(model, MODEL, ENGINE, name="plain"),
            tandem_server(config, folder / "tandem.yaml"),
        ]
        plain, tandem = stack.enter_context(all_serving([(s, folder / f"{s.name}.log") for s in servers]))
        pair = (plain, tandem)
        for server in pair:
            bench_serve(server, MODEL, requests, "inf", seed=0)
        full = bench_serve(plain, MODEL, requests, "inf", seed=0).request_throughput
        rates = {"half": f"{full / 2:.1f}", "nine_tenths": f"{full * 0.9:.1f}", "saturated": "inf"}
        return {name: _paired(pair, rate, rounds, requests) for name, rate in rates.items()}


def _paired(pair: tuple[Server, Server], rate: str, rounds: int, requests: int) -> dict[str, object]:
    plain, tandem = zip(*_runs(pair, rate, rounds, requests), strict=True)
    throughput = [t.request_throughput / p.request_throughput for p, t in zip(plain, tandem, strict=True)]
    ttft = [t.median_ttft_ms / p.median_ttft_ms for p, t in zip(plain, tandem, strict=True)]
    tpot = [t.median_tpot_ms / p.median_tpot_ms for p, t in zip(plain, tandem, strict=True)]
    return {
        "offered_rps": rate,
        "plain_rps": statistics.median(p.request_throughput for p in plain),
        "plain_median_ttft_ms": statistics.median(p.median_ttft_ms for p in plain),
        "failed": sum(run.failed for run in (*plain, *tandem)),
        "throughput_ratio": spread(throughput, 4),
        "median_ttft_ratio": spread(ttft, 4),
        "median_tpot_ratio": spread(tpot, 4),
    }


def _runs(
    pair: tuple[Server, Server], rate: str, rounds: int, requests: int
) -> Iterator[tuple[BenchRun, BenchRun]]:
    for number in range(rounds):
        order = pair if number % 2 == 0 else pair[::-1]
        runs = {s.name: bench_serve(s, MODEL, requests, rate, seed=number) for s in order}
        yield runs["plain"], runs["tandem"]


def decision_costs() -> dict[str, float]:
    """Median microseconds of one cycle for one new request, by number of running and waiting requests."""
    return {
        f"{running}_running_{waiting}_waiting": _decision_us(running, waiting)
        for running, waiting in ((1_000, 0), (256, 744))
    }


def _decision_us(running: int, waiting: int) -> float:
    ordering = EarliestDeadline(OrderingOptions(seconds(1), seconds(10)))
    admission = Admission(AdmissionOptions(2_000, seconds(60), Duration(0)), fits_ahead)
    room = _example(0).footprint.base * (running if waiting else 100 * running)
    ledger = MemoryLedger({Owner.LLM: room})
    for number in range(running):
        running_request = _example(number)
        ledger.open(running_request.request.id, Owner.LLM, running_request.footprint, priority=1)
    queue = [_example(running + number) for number in range(waiting + 1)]
    queue = [
        Waiting(w.request, w.footprint, w.until, ordering.rank(w.request, w.footprint, None), w.work)
        for w in queue
    ]
    queue.sort(key=lambda w: w.rank)
    new_request = queue[-1]
    durations = []
    for _ in range(_DECISIONS):
        start = time.perf_counter()
        share = Share(
            ceiling=ledger.ceiling(Owner.LLM),
            held=ledger.held(Owner.LLM),
            deficit=ledger.deficit(Owner.LLM),
            largest=room,
            free_slots=running,
            leases=ledger.table(Owner.LLM),
            pace=Pace(milliseconds(20), Duration(100_000)),
        )
        plan = run_cycle(
            PoolView({Owner.LLM: share}, {Owner.LLM: Queue(queue, (new_request,))}), Instant(0), admission
        )
        durations.append(time.perf_counter() - start)
        if len(plan.dispatches) + len(plan.deferrals) + len(plan.rejections) != 1:
            raise RuntimeError(f"the cycle must decide exactly one request; the plan is {plan}")
    return statistics.median(durations) * 1e6


def record_us(running: int) -> float:
    """Median microseconds to record one decision with its basis, which no number of requests lengthens."""
    ledger, entry, steps = MemoryLedger({Owner.LLM: 2**40}), _example(running), StepTime()
    for number in range(running):
        ledger.open(f"r{number}", Owner.LLM, entry.footprint, priority=1)
    column = np.ones(running)
    load = DecodeLoad(
        lambda sequences, cells: steps.predict(StepWork(0, sequences, cells)) * 1e9,
        1e5, 0.1, 1e6, running, 200 * running, 200, column, column, column, column,
    )  # fmt: skip
    share = Share(2**40, 2**30, 0, 2**40, 1, ledger.table(Owner.LLM), decode_load=load)
    view = PoolView({Owner.LLM: share}, {})
    durations = []
    for _ in range(_DECISIONS):
        history: list[Decided] = []
        start = time.perf_counter()
        history.append(Decided(Instant(0), Defer(None, Reason.NO_MEMORY), basis_of(entry, view)))
        durations.append(time.perf_counter() - start)
    return statistics.median(durations) * 1e6


def _example(number: int) -> Waiting:
    service_class = ServiceClass("standard", Slo(ttft=seconds(60)), 1, sheddable=False)
    request = Request(
        id=f"r{number:05}", kind=Kind.GENERATE, model=MODEL, tenant="default", service_class=service_class,
        slo=service_class.slo, arrival=Instant(number), prompt_tokens=200, max_output_tokens=500,
    )  # fmt: skip
    # Deterministic lengths, spread over a few hundred tokens.
    footprint = Footprint(200_000, 1_000, 50 + number * 37 % 350, 700_000)
    return Waiting(request, footprint, Instant(10**15), (0, 0, ""), footprint.area)


if __name__ == "__main__":
    raise SystemExit(main())
