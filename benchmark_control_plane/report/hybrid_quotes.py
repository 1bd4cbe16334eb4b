"""What does README.md quote of the hybrid cache? The cost of a cached token by its form, and the gain."""

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from benchmark_control_plane.report import formats

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
