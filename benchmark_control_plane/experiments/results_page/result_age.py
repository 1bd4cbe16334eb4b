"""Which rules changed after a result was measured.

A result is repeated only when there is time for it, so that each names the first decision that it precedes.
"""

from collections.abc import Mapping
from pathlib import Path

_PRECEDES: Mapping[str, tuple[str, ...]] = {
    "0028": (
        "against-vllm-bench", "burstiness", "collocated-mix", "collocation", "engine-frontier",
        "http-overhead", "ordering", "prediction-goodput", "scaling", "ttft-forecast",
    ),
    "0044": (
        "fleet-accuracy", "fleet-accuracy-overload", "fleet-order", "fleet-report-cost",
    ),
    "0058": ("plugin-cost",),
    "0060": ("one-gpu",),
    "0061": ("admission", "forecast", "memory-pressure", "quota", "retry-after", "tpot"),
    "0064": ("traces",),
    "0066": (
        "cancellation", "embed-many", "fleet-scale", "live-feed", "load", "observation-cost", "overload-10x",
        "simulated-mix-prefill",
    ),
    "0067": ("workflow", "workflow-trace"),
}  # fmt: skip
"""Results by the number of the first decision on admission, order or embedding passes that they precede."""
INDEPENDENT = frozenset(
    (
        "apt-adaptive", "apt-greedy", "embedding-forecast", "embedding-throughput", "fleet-autoscaling",
        "hybrid-attainment", "hybrid-cost-cpu-intel-r-xeon-r-processor-opt-125m",
        "hybrid-cost-h100-llama-2-7b", "hybrid-cost-h100-opt-13b", "kernel-figures", "mcsf-prediction-error",
        "mcsf-slopes", "mcsf-synthetic", "mcsf-table", "prediction",
    )
)  # fmt: skip
"""Results of no gate and no scheduler of the server."""
CURRENT = frozenset(
    (
        "fault-suite", "fleet-capacity", "fleet-choices", "fleet-faults", "fleet-policies", "fleet-retries",
        "fleet-router-lost", "fleet-routers", "fleet-staleness", "fleet-staleness-90", "fleet-traces",
        "hostile-input", "mix-compute", "mix-memory", "soak", "victims",
    )
)  # fmt: skip
"""Results of the present rules."""
PRECEDES: Mapping[str, str] = {name: number for number, names in _PRECEDES.items() for name in names}


def explanation(decisions: str) -> str:
    """The sentence that explains the remarks; `decisions` is the link to all decisions."""
    return (
        "*Before 0058* beside a source means that the result precedes that decision and some of the later "
        f"[decisions]({decisions}),\nwhich changed the rules of admission, order or embedding passes."
    )


def remark(name: str, decisions: Path, link: str) -> str:
    """The remark after the link to a result; empty for one that no later rule changes.

    `decisions` is the folder of the decisions, and `link` leads to it from the page.
    """
    if (number := PRECEDES.get(name)) is None:
        return ""
    (file,) = decisions.glob(f"{number}-*.md")
    return f", before [{number}]({link}/{file.name})"
