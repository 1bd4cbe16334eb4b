"""Measures the accuracy of our benchmark client against `vllm bench serve` and against known delays.

One plain vLLM server, and one with scripted delays; prompts of fixed length, Poisson arrivals. The clients
alternate after a warm-up round, and ours sends at the moments at which `vllm bench serve` did, since other
arrivals would load the server differently. Medians of TTFT and TPOT are compared over all rounds, those of
the scripted server with the delays that it kept. The CPU time of our client per request is reported too.

    python -m benchmark_control_plane.experiments.client_accuracy.vllm_bench
        [--rounds 2] [--requests 120] [--rate 10]
"""

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from backends import bundled_models
from benchmark_control_plane.common.servers import (
    Server,
    bench_serve,
    free_port,
    interrupt_on_sigterm,
    serving,
)
from benchmark_control_plane.experiments.client_accuracy.scripted_server import TRUTH
from benchmark_control_plane.judge.analysis import lateness
from benchmark_control_plane.judge.experiment_file import read_experiment
from benchmark_control_plane.judge.experiment_schema import LengthsSection, StreamSection
from benchmark_control_plane.judge.http_target import Dialect, HttpTarget
from benchmark_control_plane.judge.measurement_stages import LiveStage
from benchmark_control_plane.judge.memory_sampler import Read
from benchmark_control_plane.judge.open_loop_client import Clock, RunResult, Target, open_loop
from benchmark_control_plane.judge.records import RequestRecord
from benchmark_control_plane.judge.system_schema import Endpoint
from benchmark_control_plane.judge.systems import RunningSystem, running_system
from benchmark_control_plane.judge.workload import plan_requests

_EXPERIMENT = Path(__file__).parents[3] / "configs" / "bench" / "head-to-head.yaml"
_OUTPUT_TOKENS = 64
_METRICS = ("ttft_ms", "tpot_ms")
_FIRST_MS, _GAP_MS = 20.0, 4.0

Medians = dict[str, float]


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """Rounds, and requests, arrival rate and prompt length of each round."""

    rounds: int
    requests: int
    rate: float
    prompt_tokens: int


@dataclass(slots=True)
class _Judge:
    """Our client, which sends prompts as text like `vllm bench serve`, so that both include tokenization."""

    server: Server
    model: str
    load: ClientLoad
    written: Callable[[list[int]], str]
    records: list[RequestRecord] = field(default_factory=list)
    cpu_seconds: float = 0.0

    def measure(self, seed: int, moments: Sequence[float]) -> Medians:
        """Medians of one round; `moments` are the send times in seconds from its start."""
        load = self.load
        stream = StreamSection(
            kind="generate",
            service_class="interactive",
            share=1,
            prompt_tokens=LengthsSection(fixed=load.prompt_tokens),
            output_tokens=LengthsSection(fixed=_OUTPUT_TOKENS),
        )
        drawn = plan_requests(
            {"chat": stream}, rate=load.rate, seed=seed, warmup=0.0,
            measured=3 * load.requests / load.rate, data=Path(),
        )  # fmt: skip
        drawn = [replace(request, at=at) for request, at in zip(drawn, moments, strict=False)]

        async def act(target: Target, clock: Clock, read: Read | None) -> RunResult:
            assert isinstance(target, HttpTarget)
            target.prepare(drawn, seed)
            return await open_loop(target, drawn, {}, warmup=0.0, drain=60.0, clock=clock)

        running = RunningSystem(
            Endpoint(self.server.url, self.model), None, Dialect(written=self.written), None
        )
        start = time.process_time()
        found = LiveStage(running).act(act).records
        self.cpu_seconds += time.process_time() - start
        if failed := [r for r in found if r.error is not None]:
            raise RuntimeError(f"{len(failed)} of {len(found)} requests failed: {failed[0].error}")
        self.records += found
        return {name: median(v for r in found if (v := getattr(r, name)) is not None) for name in _METRICS}


def _vllm_bench(server: Server, model: str, load: ClientLoad, seed: int) -> tuple[Medians, Sequence[float]]:
    """Medians of one round, and the send time of each request in seconds."""
    run = bench_serve(
        server, model, load.requests, str(load.rate), seed=seed, input_tokens=load.prompt_tokens
    )
    return {"ttft_ms": run.median_ttft_ms, "tpot_ms": run.median_tpot_ms}, run.sent_s


def compared(server: Server, model: str, load: ClientLoad, *, knows_truth: bool) -> dict[str, Any]:
    """Medians in milliseconds of both clients on one server.

    `ratio` is ours over that of `vllm bench serve`, `beyond_truth_ms` the error of each client.
    """
    tokenizer = Tokenizer.from_file(f"{bundled_models.resolve('tandem/tiny-llama')}/tokenizer.json")
    judge = _Judge(server, model, load, tokenizer.decode)
    rounds: dict[str, list[Medians]] = {"vllm_bench": [], "judge": []}
    truths: dict[str, list[Mapping[str, float]]] = {name: [] for name in rounds}
    for number in range(load.rounds + 1):
        theirs, moments = _vllm_bench(server, model, load, number)
        rounds["vllm_bench"].append(theirs)
        truths["vllm_bench"].append(_truth(server) if knows_truth else theirs)
        ours = judge.measure(number, moments)
        rounds["judge"].append(ours)
        truths["judge"].append(_truth(server) if knows_truth else ours)
        if number == 0:  # the warm-up round
            judge.records, judge.cpu_seconds = [], 0.0
            for name in rounds:
                rounds[name].clear()
                truths[name].clear()
    beyond = {
        name: {
            m: median(seen[m] - true[m] for seen, true in zip(measured, truths[name], strict=True))
            for m in _METRICS
        }
        for name, measured in rounds.items()
    }
    medians = {name: _medians(measured) for name, measured in rounds.items()}
    return {
        "requests": len(judge.records),
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": _OUTPUT_TOKENS,
        **medians,
        "ratio": {metric: medians["judge"][metric] / medians["vllm_bench"][metric] for metric in _METRICS},
        **({"beyond_truth_ms": beyond} if knows_truth else {}),
        "rounds": rounds,
        "judge_lateness_ms": lateness([r.sent - r.scheduled for r in judge.records if r.sent is not None]),
        "client_cpu_ms_per_request": 1e3 * judge.cpu_seconds / max(1, len(judge.records)),
    }


def _medians(rounds: Sequence[Medians]) -> Medians:
    return {metric: median(found[metric] for found in rounds) for metric in _METRICS}


def _truth(server: Server) -> Mapping[str, float]:
    with urllib.request.urlopen(server.url + TRUTH, timeout=10) as response:
        medians: dict[str, float] = json.load(response)
    return medians


@contextmanager
def _known_delays(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [
        sys.executable, "-m", "benchmark_control_plane.experiments.client_accuracy.scripted_server",
        "--port", str(port),
        "--first-ms", str(_FIRST_MS), "--gap-ms", str(_GAP_MS),
    ]  # fmt: skip
    with serving(Server("known delays", command, port, "/health"), folder / "scripted.log") as server:
        yield server


@contextmanager
def _vllm(folder: Path) -> Iterator[tuple[Server, str]]:
    plan = read_experiment(_EXPERIMENT, Path()).plan
    system = plan.reference_system
    system = replace(system, split=next(iter(system.variants.values())), variants={})
    with running_system(plan, system, {}, folder) as running:
        assert running.chat is not None
        port = int(running.chat.url.rpartition(":")[2])
        yield Server("vllm", (), port, "/health"), running.chat.model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark_control_plane.experiments.client_accuracy.vllm_bench", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        nargs="*",
        default=[512, 64],
        help="prompt lengths on the vLLM server; none skips it",
    )
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    loads = [
        ClientLoad(options.rounds, options.requests, options.rate, tokens)
        for tokens in options.prompt_tokens or [64]
    ]
    found: dict[str, Any] = {
        "offered_rps": options.rate,
        "script": {"first_ms": _FIRST_MS, "gap_ms": _GAP_MS},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _known_delays(folder) as server:
            found["known_delays"] = compared(server, "scripted", loads[-1], knows_truth=True)
        if options.prompt_tokens:
            with _vllm(folder) as (server, model):
                found["vllm"] = [compared(server, model, load, knows_truth=False) for load in loads]
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
