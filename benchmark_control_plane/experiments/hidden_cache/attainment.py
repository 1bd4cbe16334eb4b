"""Measures SLO attainment with a hidden-state cache against keys and values alone (Apt-Serve's Table 4).

    python -m benchmark_control_plane.experiments.hidden_cache.attainment --seeds 21 22 23

vLLM's scheduler, stepped on virtual time: OPT-13B on an A100-40GB with 709 blocks; lengths known within
lognormal noise (sigma 0.5); requests from an empty engine, all counted. Each variant is Tandem's scheduler
under one ordering: `KV` keeps keys and values only, `M0` may restore hidden states at every step, `M2` may
absorb them. Their costs are not measured but follow from a roofline of the device (`costs`). Summaries of
arXiv papers that fit 2,048 tokens replace LongBench.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from backends.cost_models.roofline import A100_40GB, Device
from backends.vllm.simulation.stepped_engine import OPT_13B, HiddenStates, SteppedEngine, SteppedEngineSetup
from benchmark_control_plane.common.command_line import add_data, data_folder_option, exit_status
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.experiments.engine.engine_replay import EngineVariant, ReplayWindow, play
from benchmark_control_plane.experiments.engine.offered_load import Dataset, Prediction, dataset, poisson

ORDERS = ("apt", "srmt")

# (data set, rate, coefficient of variation of the gaps): percent with KV cache, with hybrid cache.
PUBLISHED: Mapping[tuple[str, float, float], tuple[float, float]] = {
    ("sharegpt", 3, 1): (99.5, 99.5), ("sharegpt", 3, 5): (94.7, 95.9), ("sharegpt", 3, 10): (75.1, 78.2),
    ("sharegpt", 6, 1): (65.7, 67.3), ("sharegpt", 6, 5): (66.7, 67.7), ("sharegpt", 6, 10): (57.1, 58.4),
    ("arxiv", 1.5, 1): (96.6, 98.2), ("arxiv", 1.5, 5): (70.0, 76.0), ("arxiv", 1.5, 10): (43.4, 50.8),
    ("arxiv", 3, 1): (70.0, 77.6), ("arxiv", 3, 5): (58.8, 64.8), ("arxiv", 3, 10): (35.6, 42.5),
}  # fmt: skip


def costs(device: Device, layers: int, heads: int, head_dim: int) -> dict[str, HiddenStates | None]:
    """Costs of each form by a roofline, in 16 bits; None for keys and values.

    M0 multiplies each token by both projections again, bound by arithmetic; that it reads half the bytes
    is left out. M2 passes twice over rows of half the size, as many bytes as keys and values, but each step
    reads both projections once more, and each request moves its queries and sums, one hidden state per head,
    out and in again. Leaving hidden states and prefill in chunks restore, as M0 does at every step.
    """
    width = heads * head_dim
    projections = layers * 2 * width * width
    moved = layers * 4 * heads * width * 2
    restored = 2 * projections / device.operations
    return {
        "KV": None,
        "M0": HiddenStates(restored, 0.0, 0.0, restored),
        "M2": HiddenStates(0.0, moved / device.bandwidth, 2 * projections / device.bandwidth, restored),
    }


def study(
    engine: SteppedEngine, data: Dataset, rate: float, variation: float, order: str, requests: int, seed: int
) -> dict[str, Any]:
    """Attainment in percent by form of the cache, on the same requests."""
    found: dict[str, Any] = {}
    for form, hidden in costs(A100_40GB, *OPT_13B).items():
        variant = EngineVariant(form, {"ordering": order}, hidden=hidden)
        offers = poisson(data.lengths, rate, seed, Prediction(0.5), variation)
        outcome = play(engine, variant, offers, ReplayWindow(0, requests), data.objectives, rate)
        found[form] = {
            "strict": 100 * outcome.strict,
            "published": 100 * outcome.published,
            "preemptions": outcome.preemptions,
        }
    return {
        "data": data.name,
        "rate": rate,
        "variation": variation,
        "order": order,
        "seed": seed,
        "of": found,
    }


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Text table: means over the seeds in both metrics, next to the paper, and M2 minus KV for each seed."""
    lines = [
        f"{'':26s} paper: KV hybrid | ours, published (strict):{'KV':>10s}{'M0':>15s}{'M2':>15s}   M2 - KV"
    ]
    for order in ORDERS:
        for (data, rate, variation), (plain, hybrid) in PUBLISHED.items():
            cell = (order, data, rate, variation)
            chosen = [r for r in runs if (r["order"], r["data"], r["rate"], r["variation"]) == cell]
            if not chosen:
                continue
            shown = []
            for form in ("KV", "M0", "M2"):
                published, strict = (mean(r["of"][form][m] for r in chosen) for m in ("published", "strict"))
                shown.append(f"{published:6.1f} ({strict:5.1f})")
            gains = [r["of"]["M2"]["published"] - r["of"]["KV"]["published"] for r in chosen]
            lines.append(
                f"{order:5s} {data:9s} {rate:4g} {variation:4g} {plain:11.1f} {hybrid:6.1f} |{'':17s}"
                + "  ".join(shown)
                + "   "
                + " ".join(f"{gain:+.1f}" for gain in gains)
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark_control_plane.experiments.hidden_cache.attainment", description=__doc__
    )
    add_data(parser)
    parser.add_argument("--orders", nargs="+", default=["apt"], choices=ORDERS)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    add_results(parser)
    options = parser.parse_args(arguments)
    setup = SteppedEngineSetup(hidden=True)
    folder = data_folder_option(options.data)
    known = {name: dataset(name, folder, setup.max_model_tokens) for name, _, _ in PUBLISHED}
    engine = SteppedEngine(setup)
    runs: list[dict[str, Any]] = []
    for order in options.orders:
        for seed in options.seeds:
            for name, rate, variation in PUBLISHED:
                runs.append(study(engine, known[name], rate, variation, order, options.requests, seed))
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    print(table(runs))
    write_or_print(options.results, {"setup": asdict(setup), "requests": options.requests, "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
