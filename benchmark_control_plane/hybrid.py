"""Runs the hybrid-cache greedy of Apt-Serve on one set of candidate requests.

Reads {"M", "rho", "n_total", "p": […], "m": […], "h"?: 0.5} and prints {"x", "y", "value", "memory"}. Input:
memory in cells, penalty per cell and candidate, number of candidates, pending times, sizes in cells, and the
size of the hidden-state tier relative to the KV tier. Output: x = 1 if scheduled, y = 1 if on hidden states.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmark_control_plane.common.command_line import (
    BadInput,
    finite,
    integer,
    items,
    number,
    print_json,
    read_object,
)
from controlplane.policy.cache_tiers.allocation import hybrid_offers, plan_tiers

HIDDEN = 1


def plan_candidates(source: Mapping[str, Any], *, whole_blocks: bool) -> dict[str, Any]:
    """Returns the plan of the greedy as {"x", "y", "value", "memory"}.

    Args:
        source: the input object of the module docstring.
        whole_blocks: round sizes on hidden states up to whole blocks.

    Raises BadInput if a value is missing, not finite or out of range.
    """
    capacity = _at_least_zero(source, "M")
    rho = _at_least_zero(source, "rho")
    ratio = number(source, "h", default=0.5)
    if ratio <= 0:
        raise BadInput(
            f"h={ratio}: the memory ratio of hidden states to KV must be positive; 0.5 in the paper"
        )
    total = integer(source.get("n_total"), "n_total", least=0)
    pending = [finite(value, f"p[{i}]") for i, value in enumerate(items(source, "p"))]
    cells = [finite(value, f"m[{i}]") for i, value in enumerate(items(source, "m"))]
    if len(pending) != len(cells):
        raise BadInput(
            f"p has {len(pending)} entries and m {len(cells)}: give one entry of each per candidate"
        )
    for name, values, least in (("p", pending, "at least 0"), ("m", cells, "positive")):
        for i, value in enumerate(values):
            if value < 0 or (value == 0 and name == "m"):
                raise BadInput(f"{name}[{i}]={value}: must be {least}")
    offers = hybrid_offers(
        np.array(pending), np.array(cells), ratio=ratio, cell_penalty=rho * total, whole_blocks=whole_blocks
    )
    plan = plan_tiers(offers, capacity)
    return {
        "x": (plan.tiers > 0).astype(int).tolist(),
        "y": (plan.tiers == HIDDEN).astype(int).tolist(),
        "value": plan.value,
        "memory": plan.size,
    }


def _at_least_zero(source: Mapping[str, Any], key: str) -> float:
    value = number(source, key)
    if value < 0:
        raise BadInput(f"{key}={value}: must be at least 0")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark_control_plane.hybrid", description=__doc__)
    parser.add_argument("candidates", help="JSON file with the candidates")
    parser.add_argument(
        "--whole-blocks", action="store_true", help="round sizes on hidden states up to whole blocks"
    )
    options = parser.parse_args(arguments)
    return print_json(
        lambda: plan_candidates(read_object(options.candidates), whole_blocks=options.whole_blocks)
    )


if __name__ == "__main__":
    sys.exit(main())
