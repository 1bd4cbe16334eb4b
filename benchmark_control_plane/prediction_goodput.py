"""What do better length forecasts buy? Attainment on vLLM's real scheduler, by what it is told of lengths.

    python -m benchmark_control_plane.prediction_goodput

Requests are the public prompts of `prediction` as one service, forecast by predictors that had not seen
them; the engine is that of `engine_frontier`, under Tandem's order, stepped on virtual time. `oracle` is
told true lengths, `history` the quantiles of recent answers, `none` nothing, `adversarial` four times the
true length or a quarter of it, at random. Nothing is rejected: what is not kept is late.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Any

from backends.vllm.stepped import Setup, SteppedEngine
from benchmark_control_plane.engine_frontier import CONTENDERS
from benchmark_control_plane.engine_play import Window, play
from benchmark_control_plane.offered import Offer, Promise
from benchmark_control_plane.prediction import FOLDS, RESULTS
from benchmark_control_plane.prediction_methods import forecasts, learned_predictor, taught
from benchmark_control_plane.prompt_sets import Sample, samples
from controlplane.core.forecast import LengthForecast
from predictors.output_length import HistoryQuantiles

PROMISE = Promise(1.0, 1.0)
_WRONG = 4

Told = Mapping[str, LengthForecast | int | None]
"""By way of forecasting, what is said of one request."""


def told(known: Sequence[Sample]) -> list[tuple[Sample, Told]]:
    random = Random(0)
    found: list[tuple[Sample, Told]] = []
    for fold in range(FOLDS):
        learning = [s for s in known if s.fold(FOLDS) != fold]
        asked = [s for s in known if s.fold(FOLDS) == fold]
        history = HistoryQuantiles()
        taught(history, learning)
        by_model = forecasts(learned_predictor(learning), asked)
        by_history = forecasts(history, asked)
        for sample, model, recent in zip(asked, by_model, by_history, strict=True):
            wrong = sample.tokens * _WRONG if random.random() < 0.5 else max(1, sample.tokens // _WRONG)
            found.append((sample, {
                "oracle": sample.tokens, "learned": model, "history": recent, "none": None,
                "adversarial": wrong,
            }))  # fmt: skip
    return found


def offers(known: Sequence[tuple[Sample, Told]], way: str, rate: float, seed: int) -> Iterator[Offer]:
    """Poisson, without end; the same seed gives the same requests at every rate and to all."""
    random, at = Random(seed), 0.0
    while True:
        sample, said = random.choice(known)
        at += random.expovariate(1.0) / rate
        length = said[way]
        if isinstance(length, LengthForecast):
            yield Offer(at, sample.prompt_tokens, sample.tokens, round(length.mean), length)
        else:
            yield Offer(at, sample.prompt_tokens, sample.tokens, length)


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Requests kept a second, mean over seeds and their spread."""
    cells: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        cells.setdefault(run["told"], {}).setdefault(run["rate"], []).append(run["rate"] * run["strict"])
    lines = []
    for way, by_rate in cells.items():
        kept = [
            f"{rate:g}/s: {mean(g):.2f} ± {stdev(g) if len(g) > 1 else 0:.2f}"
            for rate, g in sorted(by_rate.items())
        ]
        lines.append(f"{way:12} " + "  ".join(kept))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark_control_plane.prediction_goodput", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--rates", type=float, nargs="+", default=[9.0, 11.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=1_500)
    parser.add_argument("--warm-up", type=int, default=500)
    parser.add_argument("--results", type=Path, default=RESULTS / "prediction-goodput.json")
    options = parser.parse_args(arguments)
    setup = Setup()
    engine, window = SteppedEngine(setup), Window(options.warm_up, options.requests)
    known = [
        (s, said) for s, said in told(samples(options.data))
        if s.prompt_tokens + s.tokens < setup.max_model_tokens
    ]  # fmt: skip
    ways = [("stock-fcfs", "none"), *(("tandem", way) for way in known[0][1])]
    runs: list[dict[str, Any]] = []
    report = {"setup": asdict(setup), "window": asdict(window), "promise": asdict(PROMISE), "runs": runs}
    for rate in options.rates:
        for seed in options.seeds:
            for policy, way in ways:
                offered = offers(known, way, rate, seed)
                outcome = play(engine, CONTENDERS[policy], offered, window, PROMISE, rate)
                name = way if policy == "tandem" else "vLLM's own"
                runs.append({"told": name, "policy": policy, "seed": seed, **asdict(outcome)})
                print(f"{rate:g}/s, seed {seed}, {name}: strict {outcome.strict:.3f}", flush=True)
                options.results.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
