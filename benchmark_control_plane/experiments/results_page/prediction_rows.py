"""Quotes of the experiments on length and TTFT forecasts for docs/component-results.md."""

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from benchmark_control_plane.report import formats

Rows = Iterator[tuple[str, str]]


def output_length(content: Mapping[str, Any]) -> Rows:
    mixed = content["mixed"]
    losses = {name: float(method["pinball"]) for name, method in mixed.items()}
    others = {name: loss for name, loss in losses.items() if not name.startswith("learned")}
    best = min(others, key=others.__getitem__)
    learned, ridge = losses["learned"], losses["tf-idf ridge"]
    result = (
        f"{learned:.1f} tokens: {formats.times(learned / others[best])} that of the best other method "
        f"({best}), {formats.times(learned / ridge)} that of tf-idf ridge"
    )
    if (encoded := losses.get("learned, encoder")) is not None:
        result += (
            f"; with embedded prompts {formats.times(encoded / others[best])} and "
            f"{formats.times(encoded / ridge)}"
        )
    yield (
        f"Pinball loss of output-length prediction from the prompt ({content['samples']:,} outputs, "
        "five folds)",
        f"{result}; {formats.share(mixed['learned']['coverage_90'])} of the outputs are within their 0.9 "
        "quantile",
    )
    yield (
        f"The same for each of {len(content['separate'])} prompt sets served alone, relative to the best "
        "other method without embedded prompts",
        ", ".join(f"{name} {_of_best_other(methods)}" for name, methods in content["separate"].items()),
    )
    yield from _coverage(content)
    rest = [content["conditional"][seen] for seen in ("25%", "50%", "75%")]
    ours, plain = (", ".join(f"{part[key]:.1f}" for part in rest) for key in ("conditional", "minus_so_far"))
    yield (
        "Pinball loss of the remaining length after 25, 50 and 75 % of an output",
        f"{ours} tokens; first forecast minus the tokens so far: {plain}",
    )
    cost = content["cost"]
    yield (
        "Cost of one length forecast, and delay of the event loop while the model trains",
        f"{cost['both_us'] / 1e3:.2f} ms ({cost['encoder']['both_us'] / 1e3:.1f} ms with the embedded "
        f"prompt), {cost['resident_mib']:.0f} MiB; P99 delay {cost['loop']['training_p99_ms']:.1f} ms",
    )


def _of_best_other(methods: Mapping[str, Any]) -> str:
    others = [method["pinball"] for name, method in methods.items() if not name.startswith("learned")]
    return formats.times(methods["learned"]["pinball"] / min(others))


def _coverage(content: Mapping[str, Any]) -> Rows:
    stream, switches = content["coverage"], content["switches"].values()
    outside = fmean(switch["windows_outside"] for switch in switches)
    after = [covered for switch in switches for covered in switch["after_500"]]
    yield (
        "Coverage of the 0.9 quantile from 500 requests after a switch of model or traffic",
        f"{formats.share(min(after))} to {formats.share(max(after))} ({len(switches)} switches, "
        f"{len(content['seeds'])} seeds); windows of 500 with coverage outside 88 to 92 %: "
        f"{formats.share(outside)}, without switches {formats.share(stream['windows_outside'])}, "
        f"expected by chance {formats.share(stream['outside_by_chance'])}",
    )


def prediction_goodput(content: Mapping[str, Any]) -> Rows:
    runs = content["runs"]
    places = {"engine": "on vLLM's scheduler", "simulator": "at the gate, simulated"}
    for place, rate in sorted({(run["on"], run["rate"]) for run in runs}):
        goodputs: dict[str, list[float]] = {}
        for run in runs:
            if (run["on"], run["rate"]) == (place, rate):
                goodputs.setdefault(run["told"], []).append(rate * run["strict"])
        yield (
            f"Goodput by source of length forecasts, {places[place]}, at {rate:g} req/s (virtual time)",
            ", ".join(f"{name} {fmean(rates):.1f}" for name, rates in goodputs.items())
            + f" req/s ({len(next(iter(goodputs.values())))} seeds)",
        )


def ttft_forecast(content: Mapping[str, Any]) -> Rows:
    cells = [(load, cell) for key in ("known", "predicted") for load, cell in content[key].items()]
    errors, covered = ([cell[key] for _, cell in cells] for key in ("median_error", "coverage_90"))
    loads = sorted({float(load) for load, _ in cells})
    yield (
        f"Error of the TTFT forecast at {formats.load(loads[0])} to {formats.load(loads[-1])} of the rate "
        "that vLLM on the CPU sustains (tiny model)",
        f"median absolute error {formats.share(min(errors))} to {formats.share(max(errors))}; "
        f"{formats.share(min(covered))} to {formats.share(max(covered))} within the 0.9 quantile "
        f"({len(cells)} cells of {cells[0][1]['requests']} requests)",
    )
