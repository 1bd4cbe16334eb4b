"""The table of docs/results.md that states where each experiment of the project's proposal is measured."""

from collections.abc import Callable
from pathlib import Path

from benchmark_control_plane.experiments.results_page.bench_tables import markdown_table

_MEASURED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "1: attainment by mix, arrivals, lengths and batches at 50 to 150 % load, sizes of large models",
        ("matrix-sizes",),
        "simulated, one axis at a time; step times measured for OPT-13B and Llama-3-8B, derived for others",
    ),
    (
        "1: the same on real engines",
        ("mix-memory", "mix-compute", "mix-light", "mix-bursty", "mix-documents", "one-gpu"),
        "a tiny model on two cores; one-gpu: models of 8 billion weights on an H100",
    ),
    (
        "1: against tuned baselines: queue limits, small batches, niceness, static splits",
        ("mix-memory", "head-to-head"),
        "mix-memory: a queue limit of 16 and 8 requests",
    ),
    ("1: without help from the operating system's scheduler", ("mix-compute-no-idle",), ""),
    (
        "1: recorded arrivals (Azure conversation and code, ServeGen, RAGPulse)",
        ("traces", "traces-code", "workflow-trace"),
        "simulated; embeddings derived from the retrieval pattern",
    ),
    (
        "2: memory pressure: small KV caches; long outputs beside large batches, with static splits",
        ("memory-pressure", "memory-splits", "quota", "collocated-mix"),
        "simulated",
    ),
    (
        "3: length prediction: error, and performance with and without",
        ("prediction", "forecast", "predictors", "prediction-goodput"),
        "simulated performance; error on recorded outputs",
    ),
    (
        "3: prediction of the time to the first token",
        ("ttft-forecast", "admission"),
        "error; performance without rejection, which rests on it",
    ),
    (
        "3: prediction of the embedding load: error, and performance with and without",
        ("embedding-forecast", "predictors"),
        "simulated performance; error on recorded arrivals",
    ),
    (
        "4: one GPU, several, several hosts; cost of reports and of their age",
        ("fleet-capacity", "fleet-policies", "fleet-staleness", "fleet-report-cost"),
        "simulated boxes; with and without forecasts of other boxes",
    ),
    (
        "4: one to four boxes on Ray Serve",
        ("fleet-ray-capacity", "fleet-ray-latency"),
        "real boxes whose engines are simulated, on one machine",
    ),
    (
        "5: against one backbone that merges the batches of generation and embeddings",
        ("same-architecture",),
        "simulated, modelled from step times",
    ),
    (
        "metrics: device utilisation",
        ("matrix-sizes",),
        "simulated; that of a GPU was not recorded",
    ),
    (
        "arrangements: arrivals in new connections; sentence-transformers and infinity as embedding servers "
        "beside chat",
        (),
        "",
    ),
)
"""What was asked, the results that answer it, and how."""


def table(folder: Path, link: Callable[[str], str]) -> list[str]:
    """A row for each question; a result that is not kept in `folder` is named as not measured.

    `link` makes the link to the result of this name.
    """
    rows = []
    for question, names, how in _MEASURED:
        found = [link(name) for name in names if (folder / f"{name}.json").exists()]
        missing = [name for name in names if not (folder / f"{name}.json").exists()]
        state = [*found, *([f"**not measured:** {', '.join(missing)}"] if missing else [])]
        rows.append([question, "; ".join(state) or "**not measured**", how])
    return markdown_table(["experiment", "results", "how"], rows, has_texts=True)


def missing(folder: Path) -> list[str]:
    """Names of the results that are not kept."""
    names = dict.fromkeys(name for _, asked, _ in _MEASURED for name in asked)
    return [name for name in names if not (folder / f"{name}.json").exists()]
