"""Searches for the schedule of least total latency with hindsight; proves it optimal on small instances.

Reads {"M", "requests": [{"a", "s", "o"}]} and prints {"total_latency", "start", "proof", "lower_bound"}.
`proof` is "optimal" only if no schedule can be better, else "best-known".
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmark_control_plane.common.command_line import BadInput, print_json, read_object
from benchmark_control_plane.round_model.instance import HindsightInstance, read_instance
from benchmark_control_plane.round_model.optimum_bound import fluid_latency_bound, lp_bound, rounded_up
from benchmark_control_plane.round_model.optimum_proof import prove
from benchmark_control_plane.round_model.optimum_search import initial_orders, search

MOST_PROVABLE = 14
"""Largest instance, in requests, on which a proof is tried: 12 take seconds, 14 may take minutes."""

_SEARCH_SHARE = 0.7
_FIRST_SEARCH_SECONDS = 0.05
"""Search time per request before a proof starts."""


def best_schedule(instance: HindsightInstance, *, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Returns the best schedule found within about `seconds`, with a lower bound on the total latency.

    Instances of up to `MOST_PROVABLE` requests go to CP-SAT after a short search; larger ones use
    `_SEARCH_SHARE` of the time for the search and the rest for the LP bound.
    """
    if not instance.jobs:
        return {"total_latency": 0.0, "start": [], "proof": "optimal", "lower_bound": 0.0}
    started_at = time.monotonic()
    is_provable = len(instance.jobs) <= MOST_PROVABLE
    share = seconds * _SEARCH_SHARE
    if is_provable:
        share = min(share, len(instance.jobs) * _FIRST_SEARCH_SECONDS)
    search_end = started_at + share
    start = search(instance, initial_orders(instance), seed=seed, stop=lambda: time.monotonic() >= search_end)
    bound = fluid_latency_bound(instance)

    def seconds_left() -> float:
        return max(0.1, seconds - (time.monotonic() - started_at))

    if is_provable:
        proof = prove(instance, start, seconds=seconds_left(), seed=seed, workers=2 * (os.cpu_count() or 1))
        start, bound = proof.start, max(bound, proof.bound)
    else:
        bound = max(bound, lp_bound(instance, start, seconds=seconds_left()) or bound)
    total = instance.total_latency(start)
    bound = min(rounded_up(bound, instance), total)
    proof_word = "optimal" if bound >= total else "best-known"
    return {"total_latency": total, "start": start, "proof": proof_word, "lower_bound": bound}


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise BadInput(f"--seconds {text}: must be a positive number of seconds")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark_control_plane.optimum", description=__doc__)
    parser.add_argument("instance", help="JSON file with the instance")
    parser.add_argument("--seconds", default="30", help="seconds for search, proof and bound together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    def solve() -> dict[str, Any]:
        seconds = _positive(options.seconds)
        instance = read_instance(read_object(options.instance))
        return best_schedule(instance, seconds=seconds, seed=options.seed)

    return print_json(solve)


if __name__ == "__main__":
    sys.exit(main())
