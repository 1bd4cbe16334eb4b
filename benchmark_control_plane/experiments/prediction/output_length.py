"""Measures output-length prediction on public prompts: five folds, streams with switches, and its cost.

    python -m benchmark_control_plane.experiments.prediction.output_length

`--results FILE` saves the figures and draws them. Equal prompts are always in one fold. The predictor
starts without its shipped prior, which was learned from these prompts. Needs the extras `bench` and
`embeddings`. Run `--only cost` on an idle machine; `--only` alone draws again, with the results of
`goodput` in the same folder.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np

from benchmark_control_plane.common.command_line import add_data, data_folder, exit_status
from benchmark_control_plane.common.results_file import add_results, read_previous, write_json
from benchmark_control_plane.experiments.prediction.cost import cost
from benchmark_control_plane.experiments.prediction.coverage import conditional, coverage, switches
from benchmark_control_plane.experiments.prediction.methods import METHODS, pinball_losses
from benchmark_control_plane.experiments.prediction.prompt_sets import PromptSample, samples
from benchmark_control_plane.experiments.prediction.prompt_vectors import with_vectors
from controlplane.core.memory_ledger import Floats
from predictors.output_length.quantile_model import LEVELS, MEDIAN, UPPER

FOLDS = 5
MIXED = "mixed"


def cross_validate(known: Sequence[PromptSample]) -> dict[str, Any]:
    """Cross-validated scores of each method; every sample is tested once."""
    quantiles_by_method: dict[str, list[Floats]] = {name: [] for name in METHODS}
    all_tested: list[PromptSample] = []
    for fold in range(FOLDS):
        learning = [s for s in known if s.fold(FOLDS) != fold]
        tested = [s for s in known if s.fold(FOLDS) == fold]
        all_tested += tested
        for name, method in METHODS.items():
            quantiles_by_method[name].append(method(learning, tested))
    tokens = np.array([float(s.tokens) for s in all_tested])
    return {
        name: _scores(np.concatenate(parts), tokens, all_tested)
        for name, parts in quantiles_by_method.items()
    }


def _scores(quantiles: Floats, tokens: Floats, all_tested: Sequence[PromptSample]) -> dict[str, Any]:
    losses = pinball_losses(quantiles, tokens)
    by_source: dict[str, list[int]] = {}
    for at, sample in enumerate(all_tested):
        by_source.setdefault(sample.source, []).append(at)
    return {
        "mae": float(np.abs(quantiles[:, MEDIAN] - tokens).mean()),
        "pinball": float(losses.mean()),
        "coverage_90": float((tokens <= quantiles[:, UPPER]).mean()),
        "width_80": float(np.median(quantiles[:, UPPER] - quantiles[:, 0])),
        "calibration": [float((tokens <= column).mean()) for column in quantiles.T],
        "pinball_by_source": {name: float(losses[rows].mean()) for name, rows in by_source.items()},
    }


def _separate(known: Sequence[PromptSample]) -> dict[str, Any]:
    found = {}
    known = with_vectors(known)
    for source in dict.fromkeys(sample.source for sample in known):
        found[source] = cross_validate([sample for sample in known if sample.source == source])
        print(_line(source, found[source]), flush=True)
    return found


def _line(name: str, scores: dict[str, Any]) -> str:
    cells = [f"{m} {j['mae']:.1f} / {j['pinball']:.2f} / {j['coverage_90']:.3f}" for m, j in scores.items()]
    return f"{name} (MAE / pinball / coverage of 0.9): " + "; ".join(cells)


def _mixed(known: Sequence[PromptSample]) -> dict[str, Any]:
    scores = cross_validate(with_vectors(known))
    print(_line(MIXED, scores), flush=True)
    return scores


def _conditional(known: Sequence[PromptSample]) -> dict[str, Any]:
    return conditional([s for s in known if s.fold(FOLDS)], [s for s in known if not s.fold(FOLDS)])


SEEDS = (1, 2, 3, 4, 5, 6)
PARTS: dict[str, Callable[[Sequence[PromptSample]], dict[str, Any]]] = {
    "mixed": _mixed,
    "separate": _separate,
    "coverage": lambda known: coverage(known, SEEDS),
    "switches": lambda known: switches(known, SEEDS),
    "conditional": _conditional,
    "cost": cost,
}


def draw(results: dict[str, Any], goodput: Mapping[str, Any], path: Path) -> None:
    """Draws calibration, sharpness, remaining length and, from the results of `goodput`, the goodput."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, ((calibration, sharpness), (remaining, goodput_axes)) = pyplot.subplots(2, 2, figsize=(11, 8))
    for name, scores in results["mixed"].items():
        calibration.plot(LEVELS, scores["calibration"], marker="o", markersize=3, label=name)
    calibration.plot((0, 1), (0, 1), color="grey", linewidth=0.5)
    calibration.set(xlabel="stated level", ylabel="share of outputs below", title="calibration")
    calibration.legend(fontsize=7)
    names = list(results["mixed"])
    at = np.arange(len(names))
    for shift, key, scale, label in (
        (-0.2, "width_80", 0.1, "a tenth of the width from 0.1 to 0.9"),
        (0.2, "pinball", 1.0, "pinball loss"),
    ):
        sharpness.bar(at + shift, [scale * results["mixed"][n][key] for n in names], 0.4, label=label)
    sharpness.set_xticks(at, names, rotation=20, fontsize=7)
    sharpness.set(ylabel="tokens", title="sharpness and loss")
    sharpness.legend(fontsize=7)
    for way in ("conditional", "minus_so_far"):
        shares = list(results["conditional"])
        remaining.plot(shares, [results["conditional"][s][way] for s in shares], marker="o", label=way)
    remaining.set(
        xlabel="share of the output generated", ylabel="pinball loss of the rest", title="remaining length"
    )
    remaining.legend(fontsize=7)
    _draw_goodput(goodput_axes, goodput.get("runs", ()))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_goodput(axes: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    """Requests per second that met their SLO, mean over the seeds, by source of the forecasts."""
    goodputs: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        by_place = goodputs.setdefault(run["told"], {})
        by_place.setdefault(f"{run['on']}, {run['rate']:g}/s", []).append(run["rate"] * run["strict"])
    places = sorted({place for by_place in goodputs.values() for place in by_place})
    for at, (source, by_place) in enumerate(goodputs.items()):
        own = [place for place in places if place in by_place]
        shifted = [places.index(place) + 0.8 * (at / len(goodputs) - 0.5) for place in own]
        axes.bar(shifted, [fmean(by_place[place]) for place in own], 0.8 / len(goodputs), label=source)
    axes.set_xticks(range(len(places)), places, fontsize=7)
    axes.set(ylabel="goodput, requests per second", title="goodput")
    axes.margins(y=0.25)
    axes.legend(fontsize=7, ncols=3)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark_control_plane.experiments.prediction.output_length", description=__doc__
    )
    add_data(parser)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    add_results(parser)
    options = parser.parse_args(arguments)
    known = samples(data_folder(options.data, "prompts"))
    Random(0).shuffle(known)
    results = read_previous(options.results)
    results |= {"samples": len(known), "levels": LEVELS, "folds": FOLDS, "seeds": SEEDS}
    for name in options.only:
        results[name] = PARTS[name](known)
        if name not in ("mixed", "separate"):
            print(f"{name}: {json.dumps(results[name])}", flush=True)
        if options.results is not None:
            write_json(options.results, results)
    if options.results is None:
        print(json.dumps(results))
    elif {"mixed", "conditional"} <= results.keys():
        goodput = read_previous(options.results.with_name("prediction-goodput.json"))
        draw(results, goodput, options.results.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
