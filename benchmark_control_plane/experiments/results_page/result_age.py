"""Which rules changed after a result was measured.

A result is repeated only when there is time for it, so that each names the first decision that it precedes.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmark_control_plane.experiments.results_page.bench_tables import markdown_table

_PRECEDES: Mapping[str, tuple[str, ...]] = {
    "0028": (
        "against-vllm-bench", "burstiness", "collocated-mix", "engine-frontier",
        "http-overhead", "ordering", "prediction-goodput", "scaling", "ttft-forecast",
    ),
    "0044": (
        "fleet-accuracy", "fleet-accuracy-overload", "fleet-order",
    ),
    "0058": ("plugin-cost",),
    "0060": ("one-gpu",),
    "0061": ("admission", "forecast", "memory-pressure", "tpot"),
    "0066": (
        "fleet-scale", "load", "observation-cost", "overload-10x",
    ),
    "0080": ("traces",),
    "0082": ("victims",),
    "0084": ("embed-many",),
    "0090": ("quota", "traces-code", "workflow-trace"),
    "0095": ("matrix-sizes", "memory-splits"),
    "0096": ("hostile-input",),
    "0097": (
        "collocation", "predictors", "retry-after", "same-architecture",
        "tuning-gain", "tuning-on-engines", "workflow", "workflow-engines",
    ),
    "0098": ("mix-memory", "simulated-mix-prefill"),
    "0101": ("losses", "mix-compute-no-idle"),
}  # fmt: skip
"""Results by the number of the first decision that they precede on admission, order, passes or limits."""
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
        "cancellation", "decision-log-throughput", "fault-suite", "fleet-capacity", "fleet-choices",
        "fleet-conversations",
        "fleet-fairness", "fleet-faults", "fleet-kinds", "fleet-policies", "fleet-ray-capacity",
        "fleet-ray-latency", "fleet-report-cost", "fleet-retries", "fleet-retry-storms",
        "fleet-router-lost", "fleet-routers", "fleet-staleness", "fleet-staleness-90", "fleet-traces",
        "live-feed", "mix-compute", "mix-light", "soak", "virtual-day",
    )
)  # fmt: skip
"""Results of the present rules."""
PRECEDES: Mapping[str, str] = {name: number for number, names in _PRECEDES.items() for name in names}


def rules(name: str) -> str:
    """Of which rules a result is: the decision that it precedes, or the present ones."""
    if (number := PRECEDES.get(name)) is not None:
        return f"before {number}"
    return "no rules" if name in INDEPENDENT else "present rules"


def table(names: Iterable[str], decisions: Path, link: str) -> str:
    """The results by the first decision that they precede, then those of the present rules and of none.

    `decisions` is the folder of the decisions, and `link` leads to it from the page.
    """
    by_rules: dict[str, list[str]] = {}
    for name in sorted(names):
        by_rules.setdefault(rules(name), []).append(name)
    rows = []
    for number in sorted(set(PRECEDES.values())):
        if older := by_rules.get(f"before {number}"):
            (file,) = decisions.glob(f"{number}-*.md")
            title = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix(f"# {number} ")
            rows.append([f"before [{number}]({link}/{file.name}): {title}", ", ".join(older)])
    for key, words in (
        ("present rules", "present rules"),
        ("no rules", "no rule of admission or order applies"),
    ):
        if found := by_rules.get(key):
            rows.append([words, ", ".join(found)])
    return "\n".join(markdown_table(["rules", "results"], rows, has_texts=True))
