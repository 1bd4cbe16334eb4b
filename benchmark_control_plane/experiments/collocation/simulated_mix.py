"""Measures adaptive quotas against fixed splits for an LLM and an embedding model on a simulated H100.

The live gate, with its quotas, forecasts and admission, on virtual time. Llama-3-8B by a roofline of the
H100, BGE-M3 by kernel times measured on one. A step of the device runs both kinds one after the other, and
KV blocks and batches take their bytes from one pool. Chat and retrieval prompts; queries of one short text
and indexing calls of many passages. Shares of the load, LLM to embedding, are shares of the device's time,
by the throughput of each kind alone. 100 % of a mix's load is the Poisson rate at which the best fixed
split for this mix reaches 90 % attainment, mean of both kinds; it is searched first.

`static` gives each kind a fixed part, swept; `dynamic` adapts quotas and lends; `no forecast` is dynamic
without a reserve for the expected load; `no quota` lets both kinds take any free bytes. A rejected request
is a miss.

    python -m benchmark_control_plane.experiments.collocation.simulated_mix
        --data DIR [--mix 5:5] [--pattern bursty] [--load 1.0]
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import product
from math import pi, sin
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from backends.cost_models.roofline import H100_SXM, model_costs, roofline
from backends.cost_models.step_time import BatchTime, StepLoad, embedding_table, read_grid, sequential
from benchmark_control_plane.common.command_line import BadInput, add_data, data_folder, print_json
from benchmark_control_plane.common.results_file import add_results, write_json
from benchmark_control_plane.common.servers import interrupt_on_sigterm
from benchmark_control_plane.experiments.collocation.simulated_mix_summary import summary
from benchmark_control_plane.simulator.simulated_machine import Machine, divide_pool
from benchmark_control_plane.simulator.simulation import (
    Offered,
    SimulatedEmbedding,
    SimulatedRequest,
    SimulationResult,
    simulate,
)
from controlplane.core.kv_geometry import kv_geometry

LLAMA_3_8B = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "hidden_act": "silu", "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
GEOMETRY = kv_geometry(LLAMA_3_8B)
POOL_BYTES = 6 * 2**30
"""Part of an H100: with a pool of 50 GiB arithmetic is the bottleneck at these lengths and the split of the
memory has no effect."""
EMBED_BYTES_PER_TOKEN = 2 * (8 * 1024 + 4096)
"""BGE-M3 in 16 bits: eight vectors of the hidden size and one of the inner, see
`backends.embedding.memory_model`."""
BATCH_TOKENS = 32_768

MIXES = {"9:1": 0.9, "7:3": 0.7, "5:5": 0.5, "3:7": 0.3, "1:9": 0.1}
PATTERNS = ("poisson", "bursty", "periodic")
LOADS = (0.5, 1.0, 1.5)
SHARES = (0.8, 0.875, 0.925, 0.975)
SECONDS = 20.0
_PERIOD = 10.0
FULL_LOAD_KEEPS = 0.9
_SEARCH_SEED = 1_000
_SEARCH_BETWEEN, _SEARCH_STEPS = (1.0, 4.0), 5

CLASSES = {
    "interactive": {"priority": 2, "ttft_ms": 1_500, "tpot_ms": 75},
    "standard": {"priority": 1, "ttft_ms": 6_000, "tpot_ms": 150, "default": True},
    "query": {"priority": 2, "e2e_ms": 250},
    "indexing": {"priority": 1, "e2e_ms": 3_000},
}
_PROFILE = "profiles/bge_m3_h100_composed.csv"


def batch_time(folder: Path) -> BatchTime:
    """Step times of the simulated device, from the profile in the data folder."""
    table = embedding_table(read_grid(folder / _PROFILE, "seq_len", "batch", "batch_ms"))

    @lru_cache(maxsize=65_536)
    def embedding(inputs: int, length: int) -> float:
        return table(StepLoad(inputs=inputs, length=length))

    llm = roofline(H100_SXM, model_costs(LLAMA_3_8B, GEOMETRY.bytes_per_token))
    return sequential(llm, lambda load: embedding(load.inputs, load.length))


def chats(rng: np.random.Generator, times: Sequence[float]) -> list[Offered]:
    """A chat or retrieval prompt at each arrival time."""
    found: list[Offered] = []
    for at in times:
        is_rag = rng.random() < 0.5
        prompt = int(np.clip(rng.lognormal(7.8 if is_rag else 5.5, 0.5), 32, 6_000))
        output = int(np.clip(rng.lognormal(4.6, 0.7), 8, 600))
        name = "interactive" if rng.random() < 0.5 else "standard"
        found.append(SimulatedRequest(at, prompt, output, 700, name))
    return found


def embeds(rng: np.random.Generator, times: Sequence[float]) -> list[Offered]:
    """A query or an indexing call at each arrival time."""
    found: list[Offered] = []
    for at in times:
        if rng.random() < 0.6:
            found.append(SimulatedEmbedding(at, (int(rng.choice((16, 32, 64))),), "query"))
        else:
            count = int(np.clip(rng.lognormal(3.5, 0.6), 4, 128))
            lengths = rng.choice((128, 256, 512), count, p=(0.1, 0.2, 0.7))
            found.append(SimulatedEmbedding(at, tuple(int(n) for n in lengths), "indexing"))
    return found


def arrivals(
    rng: np.random.Generator, pattern: str, rate: float, seconds: float, phase: float
) -> list[float]:
    """Arrival times in seconds; `phase`, 0 to 1, is the start within the period of a periodic load."""
    if pattern == "bursty":
        # Gamma gaps of coefficient of variation 4.
        shape = 1 / 16
        gaps = rng.gamma(shape, 1 / (rate * shape), int(rate * seconds * 3) + 200)
        times = np.cumsum(gaps)
        return [float(at) for at in times[times < seconds]]
    top = rate * (1.9 if pattern == "periodic" else 1.0)
    times = np.cumsum(rng.exponential(1 / top, int(top * seconds * 2) + 50))
    times = times[times < seconds]
    if pattern == "poisson":
        return [float(at) for at in times]
    # A sine of amplitude 0.9, by thinning.
    height = [1 + 0.9 * sin(2 * pi * (at / _PERIOD + phase)) for at in times]
    return [float(at) for at, h in zip(times, height, strict=True) if rng.random() < h / 1.9]


@dataclass(frozen=True, slots=True)
class MixCapacity:
    """Requests per second of each kind alone."""

    llm: float
    embedding: float

    def times(self, factor: float) -> "MixCapacity":
        return MixCapacity(factor * self.llm, factor * self.embedding)


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of mix, arrival pattern and load."""

    mix: str
    pattern: str
    load: float

    def offered(self, capacity: MixCapacity, seconds: float, seed: int) -> list[Offered]:
        """The requests of this cell; equal for equal seeds."""
        share = MIXES[self.mix]
        key = [seed, list(MIXES).index(self.mix), PATTERNS.index(self.pattern), round(10 * self.load)]
        rng = np.random.default_rng(key)
        chat_times = arrivals(rng, self.pattern, self.load * share * capacity.llm, seconds, 0.0)
        # A periodic embedding load lags the chats by a quarter of a period.
        rate = self.load * (1 - share) * capacity.embedding
        index = arrivals(rng, self.pattern, rate, seconds, 0.75)
        return chats(rng, chat_times) + embeds(rng, index)


def machine(time: BatchTime, kv_bytes: int) -> Machine:
    """The simulated device, with `kv_bytes` of the pool for the KV cache."""
    return Machine(
        time,
        geometry=GEOMETRY,
        kv_bytes=kv_bytes,
        max_model_tokens=8_192,
        max_running=256,
        step_tokens=2_048,
        embed_batch_tokens=BATCH_TOKENS,
        embed_max_running=512,
        embed_bytes_per_token=EMBED_BYTES_PER_TOKEN,
        pool_bytes=POOL_BYTES,
    )


def capacity_of(time: BatchTime) -> MixCapacity:
    """Measures 300 simultaneous requests of each kind without objectives, until the last finishes."""
    unbounded = {
        "classes": {"unbounded": {"default": True, "sheddable": False}},
        "admission": {"max_wait_ms": 8e7, "max_waiting": 10_000},
    }
    rates = []
    for kind in (chats, embeds):
        offered = [
            replace(request, service_class=None) for request in kind(np.random.default_rng(0), [0.0] * 300)
        ]
        kv_bytes = POOL_BYTES - 2 * BATCH_TOKENS * EMBED_BYTES_PER_TOKEN
        result = simulate(offered, replace(machine(time, kv_bytes), pool_bytes=None), unbounded)
        rates.append(len(offered) / (max(r.finished or 0 for r in result.records) / 1e9))
    return MixCapacity(*rates)


@dataclass(frozen=True, slots=True)
class Policy:
    """A device and the configuration sections of one way to share its memory."""

    name: str
    device: Machine
    sections: Mapping[str, Any]


def policies(time: BatchTime) -> list[Policy]:
    """Fixed splits, adaptive quotas with and without forecast, and no quotas."""
    found = [_static(time, share) for share in SHARES]
    least = 0.025
    kv_bytes = int(POOL_BYTES * (1 - least)) // GEOMETRY.bytes_per_block * GEOMETRY.bytes_per_block
    for name, level in (("dynamic", 0.9), ("no forecast", None)):
        quota: dict[str, Any] = {
            "policy": "dynamic",
            "llm": {"nominal": 0.95, "min": 0.8, "borrow": 0.025, "lend": 0.05},
            "embedding": {"nominal": 0.05, "min": least, "borrow": 0.05, "lend": 0.025},
            "forecast": {"quantile": level, "window_ms": 250},
        }
        found.append(Policy(name, machine(time, kv_bytes), {"quota": quota}))
    found.append(Policy("no quota", machine(time, POOL_BYTES), {"quota": {"policy": "static"}}))
    return found


def full_load(time: BatchTime, capacity: MixCapacity, mix: str, seconds: float) -> float:
    """100 % load as a multiple of the capacity: bisects for the highest that a fixed split sustains."""
    low, high = _SEARCH_BETWEEN
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        offered = Cell(mix, "poisson", middle).offered(capacity, seconds, _SEARCH_SEED)
        sustained = any(play(_static(time, share), offered).both >= FULL_LOAD_KEEPS for share in SHARES)
        low, high = (middle, high) if sustained else (low, middle)
    return low


def _static(time: BatchTime, share: float) -> Policy:
    quota = {
        "policy": "static",
        "llm": {"nominal": share},
        "embedding": {"nominal": round(1 - share, 6)},
    }
    return Policy(f"static {share:g}", divide_pool(machine(time, POOL_BYTES), share), {"quota": quota})


@dataclass(frozen=True, slots=True)
class MixResult:
    """Attainment by kind and class; memory as shares of the pool."""

    llm: float
    embedding: float
    by_class: Mapping[str, float]
    mean_memory: float
    peak_memory: float
    overflows: int
    failed_batches: int
    engine_preemptions: int

    @property
    def both(self) -> float:
        """Mean attainment of both kinds, so that the many small requests do not dominate."""
        return (self.llm + self.embedding) / 2


def outcome_of(offered: Sequence[Offered], result: SimulationResult) -> MixResult:
    """Attainment and memory of one simulation."""
    met: dict[str, list[bool]] = {}
    for request, record in zip(offered, result.records, strict=True):
        met.setdefault(str(request.service_class), []).append(record.outcome == "met")
    kinds = {
        kind: [is_met for name in names for is_met in met.get(name, ())]
        for kind, names in (("llm", ("interactive", "standard")), ("embedding", ("query", "indexing")))
    }
    use, busy = result.memory, max(result.busy_seconds, 1e-9)
    return MixResult(
        llm=_share(kinds["llm"]),
        embedding=_share(kinds["embedding"]),
        by_class={name: _share(flags) for name, flags in sorted(met.items())},
        mean_memory=(use.kv_area + use.workspace_area) / busy / POOL_BYTES,
        peak_memory=use.peak / POOL_BYTES,
        overflows=use.overflows,
        failed_batches=use.failed_batches,
        engine_preemptions=result.engine_preemptions,
    )


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 1.0


def play(policy: Policy, offered: Sequence[Offered]) -> MixResult:
    """Simulates one policy."""
    result = simulate(offered, policy.device, {"classes": CLASSES, **policy.sections})
    return outcome_of(offered, result)


def study(
    folder: Path, cells: Sequence[Cell], seconds: float, seeds: Sequence[int], workers: int
) -> dict[str, Any]:
    """Simulates all cells under all policies, in parallel, and summarises them."""
    capacity = capacity_of(batch_time(folder))
    mixes = list(dict.fromkeys(cell.mix for cell in cells))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        full = dict(zip(mixes, pool.map(partial(_full_load, folder, capacity, seconds), mixes), strict=True))
        print(f"100 % load, as multiples of {capacity}: {full}", file=sys.stderr, flush=True)
        run_cell = partial(_cell, folder, {mix: capacity.times(full[mix]) for mix in mixes}, seconds)
        rows = [
            row for found in pool.map(run_cell, *zip(*product(seeds, cells), strict=True)) for row in found
        ]
    return {
        "capacity_rps": asdict(capacity),
        "full_load": full,
        "full_load_keeps": FULL_LOAD_KEEPS,
        "seconds": seconds,
        "seeds": list(seeds),
        "summary": summary(rows),
        "rows": rows,
    }


def _full_load(folder: Path, capacity: MixCapacity, seconds: float, mix: str) -> float:
    return full_load(batch_time(folder), capacity, mix, seconds)


def _cell(
    folder: Path, full: Mapping[str, MixCapacity], seconds: float, seed: int, cell: Cell
) -> list[dict[str, Any]]:
    offered = cell.offered(full[cell.mix], seconds, seed)
    found = [
        {**asdict(cell), "seed": seed, "policy": policy.name, **_plain(play(policy, offered))}
        for policy in policies(batch_time(folder))
    ]
    print(_line(found), file=sys.stderr, flush=True)
    return found


def _plain(outcome: MixResult) -> dict[str, Any]:
    return {**asdict(outcome), "both": outcome.both}


def _line(rows: Sequence[Mapping[str, Any]]) -> str:
    first = rows[0]
    each = "  ".join(f"{row['policy']} {row['both']:.3f}" for row in rows)
    return f"{first['mix']} {first['pattern']} {first['load']:g} seed {first['seed']}: {each}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_data(parser)
    parser.add_argument("--mix", choices=MIXES)
    parser.add_argument("--pattern", choices=PATTERNS)
    parser.add_argument("--load", type=float, choices=LOADS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--workers", type=int, default=1, help="cells simulated in parallel")
    add_results(parser)
    options = parser.parse_args(arguments)
    # Otherwise an interrupt would leave the workers running.
    interrupt_on_sigterm()
    chosen = [
        Cell(mix, pattern, load)
        for mix, pattern, load in product(MIXES, PATTERNS, LOADS)
        if options.mix in (None, mix) and options.pattern in (None, pattern) and options.load in (None, load)
    ]

    def command() -> Mapping[str, Any]:
        if options.seconds <= 0:
            raise BadInput(f"--seconds {options.seconds}: must be above 0")
        folder = data_folder(options.data, _PROFILE)
        found = study(folder, chosen, options.seconds, options.seeds, options.workers)
        if options.results is not None:
            write_json(options.results, found)
        summarised: Mapping[str, Any] = found["summary"]
        return summarised

    return print_json(command)


if __name__ == "__main__":
    raise SystemExit(main())
