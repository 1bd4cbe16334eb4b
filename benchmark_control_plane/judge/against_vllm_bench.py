"""Does this client measure what `vllm bench serve` measures? The same server, rate and lengths, in turn.

One plain vLLM server; random prompts of fixed length, Poisson arrivals. The two clients ask A B B A; the
medians of TTFT and TPOT are compared over all rounds. Besides, what a request costs this client in CPU.

    python -m benchmark_control_plane.judge.against_vllm_bench [--rounds 4] [--requests 120] [--rate 10]
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from backends import tiny
from benchmark_control_plane.judge.analysis import lateness
from benchmark_control_plane.judge.bench import LiveStage
from benchmark_control_plane.judge.endpoints import Dialect, HttpTarget
from benchmark_control_plane.judge.experiment import Experiment, read_experiment
from benchmark_control_plane.judge.experiment_parts import Lengths, Stream
from benchmark_control_plane.judge.memory import Read
from benchmark_control_plane.judge.records import Record
from benchmark_control_plane.judge.runner import Clock, Played, Target, play
from benchmark_control_plane.judge.systems import Up, up
from benchmark_control_plane.judge.workload import planned
from benchmark_control_plane.servers import Server, bench_serve

_EXPERIMENT = Path(__file__).parents[2] / "configs" / "bench" / "head-to-head.yaml"
_OUTPUT_TOKENS = 64


def compared(
    experiment: Experiment, rounds: int, requests: int, rate: float, prompt_tokens: int
) -> dict[str, object]:
    """Milliseconds; `ratio` is ours to theirs."""
    theirs: dict[str, list[float]] = {"ttft_ms": [], "tpot_ms": []}
    records: list[Record] = []
    seconds = 0.0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        system = experiment.plan.reference_system
        system = replace(system, split=next(iter(system.variants.values())), variants={})
        running = stack.enter_context(up(experiment.plan, system, {}, folder))
        assert running.chat is not None and experiment.plan.live is not None
        model, url = running.chat.model, running.chat.url
        tokenizer = Tokenizer.from_file(f"{tiny.resolve(experiment.plan.live.chat.model)}/tokenizer.json")
        # Their prompts are text, which the server tokenises within what is measured.
        running = replace(running, dialect=Dialect(written=tokenizer.decode))
        server = Server("vllm", (), int(url.rpartition(":")[2]), "/health")
        bench_serve(server, model, requests, str(rate), seed=0, input_tokens=prompt_tokens)
        _ours(running, requests, rate, prompt_tokens, seed=0)
        for turn in range(1, rounds + 1):
            for is_ours in (False, True) if turn % 2 else (True, False):
                if is_ours:
                    start = time.process_time()
                    records += _ours(running, requests, rate, prompt_tokens, seed=turn)
                    seconds += time.process_time() - start
                else:
                    run = bench_serve(
                        server, model, requests, str(rate), seed=turn, input_tokens=prompt_tokens
                    )
                    theirs["ttft_ms"].append(run.median_ttft_ms)
                    theirs["tpot_ms"].append(run.median_tpot_ms)
    ours = {
        "ttft_ms": median(r.ttft_ms for r in records if r.ttft_ms is not None),
        "tpot_ms": median(r.tpot_ms for r in records if r.tpot_ms is not None),
    }
    per_round = [records[i : i + requests] for i in range(0, len(records), requests)]
    return {
        "offered_rps": rate,
        "requests": len(records),
        "vllm_bench": {name: median(values) for name, values in theirs.items()},
        "judge": ours,
        "ratio": {name: ours[name] / median(values) for name, values in theirs.items()},
        "vllm_bench_rounds": theirs,
        "judge_rounds": {
            name: [median(getattr(r, name) for r in group) for group in per_round] for name in ours
        },
        "judge_lateness_ms": lateness([r.sent - r.scheduled for r in records if r.sent is not None]),
        "client_cpu_ms_per_request": 1e3 * seconds / max(1, len(records)),
    }


def _ours(running: Up, requests: int, rate: float, prompt_tokens: int, seed: int) -> list[Record]:
    """So many records, in the order planned."""
    stream = Stream(
        kind="generate",
        service_class="interactive",
        share=1,
        prompt_tokens=Lengths(fixed=prompt_tokens),
        output_tokens=Lengths(fixed=_OUTPUT_TOKENS),
    )
    plan = planned(
        {"chat": stream}, rate=rate, seed=seed, warmup=0.0, measured=3 * requests / rate, data=Path()
    )[:requests]

    async def act(target: Target, clock: Clock, read: Read | None) -> Played:
        assert isinstance(target, HttpTarget)
        target.prepare(plan, seed)
        return await play(target, plan, {}, warmup=0.0, drain=60.0, clock=clock)

    records = LiveStage(replace(running, metrics=None), limit=512).act(act).records
    if lost := [r for r in records if r.error is not None]:
        raise RuntimeError(f"{len(lost)} of {len(records)} requests failed: {lost[0].error}")
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="against_vllm_bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    options = parser.parse_args(arguments)
    experiment = read_experiment(_EXPERIMENT, Path())
    print(
        json.dumps(
            compared(experiment, options.rounds, options.requests, options.rate, options.prompt_tokens),
            indent=1,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
