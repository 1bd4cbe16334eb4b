"""Which figures does README.md quote? Only those of the committed results, written here and nowhere else.

    python -m benchmark_control_plane.experiments.results_page.write_pages [--check | --keep DIR]

Rewrites what stands between the two marks, and the picture beside the results shown in full: those of
real engines. Of every other experiment of `tandem bench run` the rates are quoted; of the other results
FIGURES says what. A result that is not there is not quoted. `--keep` first takes a folder of `tandem bench
run` among the committed results.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmark_control_plane.common.arguments import BadInput, read_object
from benchmark_control_plane.common.results_file import write_atomic
from benchmark_control_plane.experiments.engine.frontier import points_at
from benchmark_control_plane.experiments.results_page import quotes
from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.headline import headline
from benchmark_control_plane.report.page import picture
from benchmark_control_plane.report.results_folder import committed, read_results
from benchmark_control_plane.report.schema import FORMAT, Results, results_of

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmark_control_plane" / "results"
README = ROOT / "README.md"
IN_FULL = ("head-to-head.json", "head-to-head-strict.json")
BEGIN = "<!-- Measured: written by python -m benchmark_control_plane.experiments.results_page.write_pages -->"
END = "<!-- End of what was measured -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 done or up to date, 1 not up to date, 2 the README or a result is wrong."""
    parser = argparse.ArgumentParser(description="Write the committed results into README.md.")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if something would change")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="commit these results too")
    options = parser.parse_args(arguments)
    try:
        if options.keep is not None:
            results = read_results(options.keep)
            file = RESULTS / f"{results['experiment']['name']}.json"
            if file.exists() and file not in {known for known, _ in experiments(RESULTS)}:
                raise BadInput(f"{file.name} holds another benchmark's result; rename the experiment")
            write_atomic(file, committed(results))
        changed = {
            file: text for file, text in due().items() if not file.exists() or file.read_text() != text
        }
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    if options.check:
        return int(bool(changed))
    for file, text in changed.items():
        write_atomic(file, text)
    return 0


def due(readme: Path = README, folder: Path = RESULTS) -> dict[Path, str]:
    """What README.md and the pictures of the experiments should hold."""
    pictures = {
        file.with_suffix(".svg"): picture(results)
        for file, results in experiments(folder)
        if file.name in IN_FULL
    }
    return {readme: rewritten(readme.read_text(encoding="utf-8"), section(folder))} | pictures


def experiments(folder: Path) -> Iterator[tuple[Path, Results]]:
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("format") == FORMAT:
            yield file, results_of(content, file.name)


def rewritten(text: str, content: str) -> str:
    """Raises BadInput where the marks are not there once, in order."""
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end) or BEGIN in rest or END in after:
        raise BadInput(f"README.md: the lines {BEGIN!r} and {END!r} are needed once each, in this order")
    return f"{before}{BEGIN}\n\n{content}\n{END}{after}"


def section(folder: Path) -> str:
    found = list(experiments(folder))
    parts = [_experiment(results, file) for name in IN_FULL for file, results in found if file.name == name]
    quoted = [
        f"| {results['experiment']['question']} | {_rates(aggregates.ordered(results))} | {_link(file)} |"
        for file, results in found
        if file.name not in IN_FULL
    ] + [
        f"| {question} | {answer} | {_link(file)} |"
        for file, name in sorted((file, name) for name in FIGURES for file in folder.glob(name))
        for question, answer in FIGURES[name](read_object(str(file)))
    ]
    if quoted:
        parts.append("\n".join(("| question | answer | from |", "|---|---|---|", *quoted, "")))
    return "\n".join(parts)


def _experiment(results: Results, file: Path) -> str:
    """The finding, then the systems side by side: rates, attainment under the highest load, losses. Where
    some were not run under it, all of them again under one that they share."""
    ordered = aggregates.ordered(results)
    names, loads = [system["name"] for system in ordered["systems"]], aggregates.loads(ordered)
    whole = [name for name in names if loads and aggregates.runs_of(ordered, name, loads[-1])]
    lines = _rates_table(ordered, whole, loads[-1]) if whole else []
    lines += _shared_table(ordered, [name for name in names if name not in whole])
    refused = aggregates.invalid(ordered)
    remarks = [f"{formats.several(len(aggregates.seeds(ordered)), 'seed')}, medians; {_link(file)}"]
    if refused:
        remarks.append(f"{len(refused)} of {len(ordered['runs'])} runs not valid and left out")
    if ordered["partial"]:
        remarks.append("**partial: the experiment was interrupted**")
    question = ordered["experiment"]["question"]
    shown = f"![Attainment against load](benchmark_control_plane/results/{file.stem}.svg)"
    said = f"**{question}** {headline(ordered)}"
    return "\n".join((said, "", shown, "", *lines, f"({'; '.join(remarks)}.)", ""))


def _rates(results: Results) -> str:
    """Of each system, at the first target, beside what it attains under the highest load: medians."""
    if not aggregates.targets(results):
        return headline(results)
    goal, load = aggregates.targets(results)[0], aggregates.common_loads(results)[-1]
    told = []
    for system in results["systems"]:
        row = aggregates.frontier(results, system["name"], goal)
        is_limit = row is not None and aggregates.is_limit(results, row)
        rate = formats.reached(row["rps"] if row else None, is_limit=is_limit)
        met = _median(
            aggregates.attained(aggregates.runs_of(results, system["name"], load), aggregates.OVERALL)
        )
        told.append(f"{system['name']} {rate} ({met})")
    seeds = formats.several(len(aggregates.seeds(results)), "seed")
    partial = "; **partial**" if results["partial"] else ""
    met_at = f"in brackets what is met at {formats.load(load)} load"
    return f"at {formats.share(goal)}: {', '.join(told)}; {met_at} ({seeds}{partial})"


def _rates_table(results: Results, systems: Sequence[str], load: float) -> list[str]:
    goals = aggregates.targets(results)
    rates = [f"req/s at {formats.share(goal)}" for goal in goals]
    rows = (
        [name, *(_rate_cell(results, name, goal) for goal in goals), *_met_cells(results, name, load)]
        for name in systems
    )
    return _table(["system", *rates, *_met_head(results, load)], rows)


def _shared_table(results: Results, few: Sequence[str]) -> list[str]:
    """Under the highest load of these few, on the seeds that they have in common."""
    loads = [run["load"] for run in results["runs"] if run["system"] in few and run["valid"]]
    if not loads:
        return []
    load = max(loads)
    seeds = [{run["seed"] for run in aggregates.runs_of(results, name, load)} for name in few]
    shared = set.intersection(*filter(None, seeds))
    same: Results = {**results, "runs": [run for run in results["runs"] if run["seed"] in shared]}
    rows = ([system["name"], *_met_cells(same, system["name"], load)] for system in results["systems"])
    said = f"All under one load, on the seeds that are valid for all ({', '.join(map(str, sorted(shared)))}):"
    return [said, "", *_table(["system", *_met_head(results, load)], rows)]


def _rate_cell(results: Results, system: str, goal: float) -> str:
    if (row := aggregates.frontier(results, system, goal)) is None:
        return formats.ABSENT
    ends, least = aggregates.rates(row), "at least " if aggregates.is_limit(results, row) else ""
    spread = f" ({formats.spread(ends.low, ends.high)})" if ends and ends.low < ends.high else ""
    return f"{least}{formats.figure(row['rps'])}{spread}"


def _met_head(results: Results, load: float) -> list[str]:
    return [f"met at {formats.load(load)} load", *aggregates.classes(results), "rejected", "evicted"]


def _met_cells(results: Results, system: str, load: float) -> list[str]:
    runs = aggregates.runs_of(results, system, load)
    cells = [
        _median(aggregates.attained(runs, name))
        for name in (aggregates.OVERALL, *aggregates.classes(results))
    ]
    cells.append(_median(aggregates.over_seeds(runs, lambda run: run["rates"]["reject"])))
    cells.append(_median(aggregates.over_seeds(runs, lambda run: run["rates"]["evict"])))
    return cells


def _median(over: aggregates.Spread | None) -> str:
    return formats.share(over.median if over else None)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_line(head), "|---|" + "--:|" * (len(head) - 1), *map(_line, rows), ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _link(file: Path) -> str:
    return f"[{file.stem}](benchmark_control_plane/results/{file.name})"


Quotes = Iterator[tuple[str, str]]
"""(question, answer)."""


def _door(content: Mapping[str, Any]) -> Quotes:
    busy = content["door"]["nine_tenths"]
    yield (
        "What does the door cost, at nine tenths of the rate of vLLM's own server (tiny model, two cores)?",
        f"TTFT {_ratio(busy['median_ttft_ratio'])}, TPOT {_ratio(busy['median_tpot_ratio'])}, "
        f"throughput {_ratio(busy['throughput_ratio'])} of plain vLLM's",
    )
    cost = max(content["decision_us"].values())
    yield "What does one decision cost at 1,000 live requests?", f"{cost:.0f} µs"


_FRONTIERS = (
    ("sharegpt", "oracle", "ShareGPT, known lengths"),
    ("sharegpt", "noisy", "ShareGPT, lengths with a lognormal error of 0.5"),
    ("humaneval", "oracle", "HumanEval-like, known lengths"),
    ("arxiv", "oracle", "arXiv, known lengths"),
)


def _engine_frontier(content: Mapping[str, Any]) -> Quotes:
    for data, prediction, words in _FRONTIERS:
        told, known = [], []
        waits = [_lost(content["studies"], data, *who) for who in (("tandem", prediction), ("stock-fcfs",))]
        for goal, key in ((90, "strict-90%"), (60, "strict-60%")):
            if ratios := _over("stock-fcfs", content["studies"], data, prediction, key):
                spread = {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
                told.append(f"{_ratio(spread)} at {goal} %")
            if shares := _over("hindsight", content["studies"], data, prediction, key):
                known.append(f"{100 * median(shares):.0f}")
        if told:
            seeds = "1 seed" if len(ratios) == 1 else f"{len(ratios)} seeds"
            yield (
                f"Which rate does our order carry on vLLM's real scheduler (virtual time, {words})?",
                f"{', '.join(told)} of vLLM's own order's, without rejecting ({seeds})"
                + (f"; {' and '.join(known)} % of what hindsight would carry" if known else "")
                + f"; at 90 % those that lose wait {waits[0]} (P95 until a run ends, worst seed; "
                f"in vLLM's own order {waits[1]})",
            )


def _lost(studies: Sequence[Mapping[str, Any]], data: str, policy: str, prediction: str = "oracle") -> str:
    """How long those waited that lost their promise, each seed at the highest rate seen that reaches 90 %."""
    wanted = (data, policy, prediction)
    runs = [one for one in studies if (one["dataset"], one["policy"], one["prediction"]) == wanted]
    waits = [point["lost_wait"]["p95"] for point in points_at(runs, 0.9)]
    return f"{formats.figure(max(waits))} s" if waits else formats.ABSENT


def _over(
    other: str, studies: Sequence[Mapping[str, Any]], data: str, prediction: str, key: str
) -> list[float]:
    """Our rate by the other's, which knows all lengths, on each seed that both have run."""
    rates = {
        (one["policy"], one["prediction"], one["seed"]): one["rates"][key]
        for one in studies
        if one["dataset"] == data
    }
    return [
        rate / rates[other, "oracle", seed]
        for (policy, predicted, seed), rate in rates.items()
        if (policy, predicted) == ("tandem", prediction) and (other, "oracle", seed) in rates
    ]


def _mcsf_table(content: Mapping[str, Any]) -> Quotes:
    means = {row["policy"]: row["mean_s"] for row in content["fixed_set"]}
    yield (
        "Which mean latency has it on the published benchmark of memory-constrained scheduling?",
        f"{means['Tandem']:.1f} s; MC-SF {means['MC-SF']:.1f} s, vLLM's order {means['FCFS as vLLM']:.1f} s "
        f"({content['runs']} runs)",
    )


def _mcsf_synthetic(content: Mapping[str, Any]) -> Quotes:
    worst = max(model["to_best_known"]["tandem"]["mean"] for model in content["models"])
    yield (
        "How far is the total latency of our round order from the best known in hindsight?",
        f"{100 * (worst - 1):.1f} % ({content['instances']} instances of each of two arrival models)",
    )


def _collocation(content: Mapping[str, Any]) -> Quotes:
    interval = content["workload"]["burst_interval_s"]
    for key, cell in content.items():
        if not key.startswith("chat_"):
            continue
        ratio, rate = cell["tandem_over_naive"], key.split("_")[1]
        burst = min(cell["unloaded_burst_s"].values())
        ours, theirs = (formats.share(cell[who]["burst_attainment"]) for who in ("tandem", "naive"))
        alone = cell["alone"]["tandem"]["p99_ttft_ms"] / cell["naive"]["p99_ttft_ms"]
        yield (
            f"How do chat at {rate}/s and a burst of passages every {interval:g} s ({burst:.2g} s alone) "
            "share two cores, beside two servers that know nothing of each other?",
            f"P99 TTFT {formats.times(ratio['p99_ttft_ms'])} ({formats.times(alone)} without any passages), "
            f"TPOT {formats.times(ratio['p99_tpot_ms'])}, "
            f"passages/s {formats.times(ratio['passages_per_s'])} of theirs; bursts in time {ours} "
            f"(theirs {theirs}; {len(cell['runs'])} runs, medians)",
        )


def _embedding_throughput(content: Mapping[str, Any]) -> Quotes:
    for texts in ("queries", "passages"):
        ratios = content[texts]["ratios"]
        yield (
            f"How fast does the embedding engine compute {texts}?",
            f"{formats.times(ratios['engine_over_encode'])} of `encode` fed all at once; over HTTP "
            f"{formats.times(ratios['tandem_http_over_encode'])} of it and "
            f"{formats.times(ratios['tandem_http_over_infinity_http'])} of infinity-emb's",
        )


def _collocated_mix(content: Mapping[str, Any]) -> Quotes:
    summary = content["summary"]
    policies, best = summary["policies"], summary["best_static"]
    free = policies["no quota"]
    yield (
        "What do moving quotas keep, over 45 mixes and loads on a simulated H100?",
        f"{formats.share(policies['dynamic']['both'])} of both kinds' promises; the best of the fixed splits "
        f"{formats.share(policies[best]['both'])}; without quotas {formats.share(free['both'])}, with "
        f"{free['failed_batches']:,} batches that found no memory",
    )


def _against_vllm_bench(content: Mapping[str, Any]) -> Quotes:
    for one in content.get("vllm", ()):
        ratio, tokens = one["ratio"], f"{one['prompt_tokens']} + {one['output_tokens']} tokens"
        yield (
            f"Does the judge's client measure what `vllm bench serve` does, on one vLLM server ({tokens})?",
            f"TTFT {formats.times(ratio['ttft_ms'])}, TPOT {formats.times(ratio['tpot_ms'])} of its medians",
        )
    if (known := content.get("known_delays")) is not None:
        ours, theirs = known["beyond_truth_ms"]["judge"], known["beyond_truth_ms"]["vllm_bench"]
        yield (
            "How far beyond the truth is each, on a server of known delays?",
            f"TTFT {ours['ttft_ms']:+.2f} ms, TPOT {ours['tpot_ms']:+.3f} ms; `vllm bench serve` "
            f"{theirs['ttft_ms']:+.2f} ms, {theirs['tpot_ms']:+.3f} ms",
        )


def _ratio(spread: Mapping[str, float]) -> str:
    return f"{formats.times(spread['median'])} ({spread['min']:.2f} to {spread['max']:.2f})"


FIGURES: Mapping[str, Callable[[Mapping[str, Any]], Quotes]] = {
    "door.json": _door,
    "against-vllm-bench.json": _against_vllm_bench,
    "collocation.json": _collocation,
    "embedding-throughput.json": _embedding_throughput,
    "prediction.json": quotes.lengths,
    "prediction-goodput.json": quotes.goodput,
    "ttft-forecast.json": quotes.first_token,
    "retry-after.json": quotes.retry_after,
    "collocated-mix.json": _collocated_mix,
    "engine-frontier.json": _engine_frontier,
    "hybrid-cost-*.json": quotes.cost,
    "hybrid-attainment.json": quotes.attainment,
    "mcsf-table.json": _mcsf_table,
    "mcsf-synthetic.json": _mcsf_synthetic,
}


if __name__ == "__main__":
    sys.exit(main())
