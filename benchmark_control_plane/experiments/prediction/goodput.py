"""Measures goodput by source of length forecasts, on vLLM's scheduler and at the simulated gate.

    python -m benchmark_control_plane.experiments.prediction.goodput

Requests are the public prompts of `prompt_sets` as one service, forecast by predictors that had not learned
them; the engine is that of `engine.frontier`, under Tandem's policy, stepped on virtual time. `oracle`
gives true lengths, `history` the quantiles of recent outputs, `none` nothing, `adversarial` four times the
true length or a quarter of it, at random. The scheduler rejects nothing: a request that misses its SLO is
late. The part of the gate is in `gate_goodput`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import islice, product
from random import Random
from statistics import mean, stdev
from typing import Any

from backends.vllm.simulation.stepped_engine import SteppedEngine, SteppedEngineSetup
from benchmark_control_plane.common.command_line import add_data, data_folder, exit_status
from benchmark_control_plane.common.results_file import add_results, read_previous, write_or_print
from benchmark_control_plane.experiments.engine.engine_replay import ReplayWindow, play
from benchmark_control_plane.experiments.engine.frontier import CONTENDERS
from benchmark_control_plane.experiments.engine.offered_load import Offer, TokenObjectives
from benchmark_control_plane.experiments.prediction.gate_goodput import replay_gate
from benchmark_control_plane.experiments.prediction.methods import forecasts, learned_predictor, train
from benchmark_control_plane.experiments.prediction.output_length import FOLDS
from benchmark_control_plane.experiments.prediction.prompt_sets import PromptSample, samples
from controlplane.core.forecast import LengthForecast
from predictors.output_length.history_predictor import HistoryQuantiles

OBJECTIVES = TokenObjectives(1.0, 1.0)
_ERROR_FACTOR = 4

Forecasts = Mapping[str, LengthForecast | int | None]
"""Forecasts of one request by their source; an integer is a known length, None no forecast."""


def cross_forecasts(known: Sequence[PromptSample]) -> list[tuple[PromptSample, Forecasts]]:
    """Every sample with its forecasts by predictors that learned the other folds."""
    random = Random(0)
    found: list[tuple[PromptSample, Forecasts]] = []
    for fold in range(FOLDS):
        learning = [s for s in known if s.fold(FOLDS) != fold]
        tested = [s for s in known if s.fold(FOLDS) == fold]
        history = HistoryQuantiles()
        train(history, learning)
        by_model = forecasts(learned_predictor(learning), tested)
        by_history = forecasts(history, tested)
        for sample, model, recent in zip(tested, by_model, by_history, strict=True):
            wrong = (
                sample.tokens * _ERROR_FACTOR
                if random.random() < 0.5
                else max(1, sample.tokens // _ERROR_FACTOR)
            )
            found.append((sample, {
                "oracle": sample.tokens, "learned": model, "history": recent, "none": None,
                "adversarial": wrong,
            }))  # fmt: skip
    return found


def offers(
    known: Sequence[tuple[PromptSample, Forecasts]], source: str, rate: float, seed: int
) -> Iterator[Offer]:
    """Endless Poisson trace with the forecasts of `source`; a seed gives the same requests at every rate."""
    random, at = Random(seed), 0.0
    while True:
        sample, by_source = random.choice(known)
        at += random.expovariate(1.0) / rate
        length = by_source[source]
        if isinstance(length, LengthForecast):
            yield Offer(at, sample.prompt_tokens, sample.tokens, round(length.mean), length)
        else:
            yield Offer(at, sample.prompt_tokens, sample.tokens, length)


Known = Sequence[tuple[PromptSample, Forecasts]]
Run = dict[str, Any]


def run_on_engine(
    known: Known, setup: SteppedEngineSetup, window: ReplayWindow, rate: float, seed: int
) -> Iterator[Run]:
    """Replays vLLM's FCFS, and Tandem's policy with each source of forecasts."""
    engine = _stepped(setup)
    for policy, source in (("stock-fcfs", "none"), *(("tandem", source) for source in known[0][1])):
        outcome = play(
            engine, CONTENDERS[policy], offers(known, source, rate, seed), window, OBJECTIVES, rate
        )
        yield {"told": source if policy == "tandem" else "vLLM's own", "policy": policy, **asdict(outcome)}


@cache
def _stepped(setup: SteppedEngineSetup) -> SteppedEngine:
    """One engine per process."""
    return SteppedEngine(setup)


def run_at_gate(
    known: Known, setup: SteppedEngineSetup, window: ReplayWindow, rate: float, seed: int
) -> Iterator[Run]:
    """Simulates the gate with each source of forecasts."""
    # Requests after the window keep the load constant until it ends.
    count = window.warm_up + window.requests + window.warm_up
    for source in known[0][1]:
        offered = list(islice(offers(known, source, rate, seed), count))
        yield {"told": source, **asdict(replay_gate(offered, setup, window, OBJECTIVES, rate))}


PLACES: Mapping[str, Callable[[Known, SteppedEngineSetup, ReplayWindow, float, int], Iterator[Run]]] = {
    "simulator": run_at_gate,
    "engine": run_on_engine,
}


def table(runs: Sequence[Run]) -> str:
    """Requests per second that met their SLO, mean and deviation over the seeds."""
    cells: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        by_rate = cells.setdefault(f"{run['on']}, {run['told']}", {})
        by_rate.setdefault(run["rate"], []).append(run["rate"] * run["strict"])
    lines = []
    for source, by_rate in cells.items():
        values = [
            f"{rate:g}/s: {mean(g):.2f} ± {stdev(g) if len(g) > 1 else 0:.2f}"
            for rate, g in sorted(by_rate.items())
        ]
        lines.append(f"{source:24} " + "  ".join(values))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark_control_plane.experiments.prediction.goodput", description=__doc__
    )
    add_data(parser)
    parser.add_argument("--on", nargs="+", choices=list(PLACES), default=list(PLACES))
    parser.add_argument("--rates", type=float, nargs="+", default=[9.0, 11.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--warm-up", type=int, default=300)
    add_results(parser)
    options = parser.parse_args(arguments)
    setup, window = SteppedEngineSetup(), ReplayWindow(options.warm_up, options.requests)
    known = [
        (s, by_source) for s, by_source in cross_forecasts(samples(data_folder(options.data, "prompts")))
        if s.prompt_tokens + s.tokens < setup.max_model_tokens
    ]  # fmt: skip
    before = read_previous(options.results).get("runs", [])
    runs = [run for run in before if run["on"] not in options.on]
    report = {
        "setup": asdict(setup),
        "window": asdict(window),
        "objectives": asdict(OBJECTIVES),
        "runs": runs,
    }
    for place, rate, seed in product(options.on, options.rates, options.seeds):
        for run in PLACES[place](known, setup, window, rate, seed):
            runs.append({"on": place, "seed": seed, **run})
            print(f"{place}, {rate:g}/s, seed {seed}, {run['told']}: {run['strict']:.3f}", flush=True)
    print(table(runs))
    write_or_print(options.results, report)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
