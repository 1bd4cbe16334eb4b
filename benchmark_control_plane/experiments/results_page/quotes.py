"""What does README.md quote of the predictors? How good forecasts are, what they cost, what they buy."""

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from benchmark_control_plane.report import formats


def lengths(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of `prediction`: the length of answers."""
    mixed = content["mixed"]
    losses = {name: float(one["pinball"]) for name, one in mixed.items()}
    others = {name: loss for name, loss in losses.items() if not name.startswith("learned")}
    best = min(others, key=others.__getitem__)
    learned = losses["learned"]
    told = f"pinball loss {learned:.1f} tokens, {formats.times(learned / others[best])} of {best}'s"
    told += f" and {formats.times(learned / others['tf-idf ridge'])} of a plain tf-idf ridge's"
    if (encoded := losses.get("learned, encoder")) is not None:
        told += f"; {formats.times(encoded / others[best])} and "
        told += f"{formats.times(encoded / others['tf-idf ridge'])} where prompts were embedded before"
    yield (
        f"How well are answer lengths foretold from the prompt ({content['samples']:,} answers, five folds)?",
        f"{told}; {formats.share(mixed['learned']['coverage_90'])} of the answers stay within their 0.9 "
        "quantile",
    )
    yield (
        f"And where each of these {len(content['separate'])} sets of prompts is all that is served?",
        "pinball loss, of the best other way's without vectors: "
        + ", ".join(f"{name} {_of_best_other(methods)}" for name, methods in content["separate"].items()),
    )
    stream, switches = content["coverage"], content["switches"].values()
    outside = fmean(one["windows_outside"] for one in switches)
    after = [covered for one in switches for covered in one["after_500"]]
    yield (
        "How many answers are within their 0.9 quantile 500 requests after a switch of model or traffic?",
        f"{formats.share(min(after))} to {formats.share(max(after))} ({len(switches)} switches, "
        f"{len(content['seeds'])} seeds); of windows of 500 {formats.share(outside)} leave 88 to 92 %, "
        f"without switches {formats.share(stream['windows_outside'])}, by chance alone "
        f"{formats.share(stream['outside_by_chance'])} would",
    )
    rest = [content["conditional"][seen] for seen in ("25%", "50%", "75%")]
    ours, plain = (", ".join(f"{one[key]:.1f}" for one in rest) for key in ("conditional", "minus_so_far"))
    yield (
        "How well is the rest of an answer foretold after 25, 50 and 75 % of it?",
        f"pinball loss {ours} tokens; of the first forecast less the tokens so far {plain}",
    )
    cost = content["cost"]
    yield (
        "What does a forecast cost, and what does learning cost the requests meanwhile?",
        f"{cost['both_us'] / 1e3:.2f} ms ({cost['encoder']['both_us'] / 1e3:.1f} ms with a prompt's vector), "
        f"{cost['resident_mib']:.0f} MiB; the loop is {cost['loop']['training_p99_ms']:.1f} ms late at P99",
    )


def _of_best_other(methods: Mapping[str, Any]) -> str:
    others = [one["pinball"] for name, one in methods.items() if not name.startswith("learned")]
    return formats.times(methods["learned"]["pinball"] / min(others))


def goodput(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of `prediction_goodput`."""
    runs = content["runs"]
    places = {"engine": "on vLLM's real scheduler", "simulator": "at the gate, simulated,"}
    for place, rate in sorted({(run["on"], run["rate"]) for run in runs}):
        kept: dict[str, list[float]] = {}
        for run in runs:
            if (run["on"], run["rate"]) == (place, rate):
                kept.setdefault(run["told"], []).append(rate * run["strict"])
        yield (
            f"What do length forecasts buy {places[place]} at {rate:g} requests/s (virtual time)?",
            "requests kept a second: "
            + ", ".join(f"{name} {fmean(rates):.1f}" for name, rates in kept.items())
            + f" ({len(next(iter(kept.values())))} seeds)",
        )


def first_token(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of `ttft_forecast`."""
    cells = [(load, one) for key in ("known", "foretold") for load, one in content[key].items()]
    errors, covered = ([one[key] for _, one in cells] for key in ("median_error", "coverage_90"))
    loads = sorted({float(load) for load, _ in cells})
    yield (
        f"How well is the first token foretold, at {formats.load(loads[0])} to {formats.load(loads[-1])} of "
        "what vLLM on the CPU carries (tiny model)?",
        f"median absolute error {formats.share(min(errors))} to {formats.share(max(errors))}; "
        f"{formats.share(min(covered))} to {formats.share(max(covered))} within the 0.9 quantile "
        f"({len(cells)} cells of {cells[0][1]['requests']} requests)",
    )


def retry_after(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of `retry_after`."""
    runs = [run for run in content["runs"] if run["turned_away"]]
    admitted, away = (sum(run[key] for run in runs) for key in ("then_admitted", "turned_away"))
    yield (
        "Are those who wait as `Retry-After` says then let in (bursts, simulated)?",
        f"{formats.share(admitted / away)} of {away}; in the worst of {len(runs)} runs "
        f"{formats.share(min(run['then_admitted'] / run['turned_away'] for run in runs))}",
    )


# FOLDED hybrid_quotes.py:
# What does README.md quote of the hybrid cache? The cost of a cached token by its form, and the gain.

_FORMS = {"m0": "hidden states, restored", "m1": "half restored", "m2": "absorbed"}


def cost(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of `hybrid_cost`, on one device."""
    taken = {form: row["ms_per_1000_tokens"] for form, row in content["forms"].items()}
    plain = taken.pop("kv")
    told = [
        f"{_FORMS[form]} {formats.figure(ms)} ms ({formats.times(ms / plain)})" for form, ms in taken.items()
    ]
    yield (
        f"What do 1,000 cached tokens add to a decode step ({content['model']}, {content['dtype']}, "
        f"{content['device']})?",
        f"keys and values {formats.figure(plain)} ms; {', '.join(told)}",
    )


def attainment(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of `hybrid_attainment`, in Apt-Serve's metric."""
    told = []
    for form, words in (("M2", "absorbed"), ("M0", "restored")):
        gains = [run["of"][form]["published"] - run["of"]["KV"]["published"] for run in content["runs"]]
        told.append(f"{words} {fmean(gains):+.1f} points ({min(gains):+.1f} to {max(gains):+.1f})")
    yield (
        "How many more promises are kept where requests may keep hidden states (vLLM's real scheduler, "
        "virtual time, OPT-13B on an A100 by a roofline)?",
        f"{', '.join(told)}, over {len(content['runs'])} runs",
    )
