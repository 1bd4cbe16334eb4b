"""What does an embedding tenant cost the chat tenant beside it? A naive pair of servers, and Tandem.

The naive pair is vLLM's own server and `plain_embeddings`, each alone on the machine as far as it knows.
Tandem serves the same two models behind one gate. Chat arrives open-loop (Poisson); a burst of passages
arrives in one request at a fixed interval. Both stacks stay up; slices of the same arrivals go to
them in turn, A B B A, and their requests are pooled. The deadline of a burst is three times what it
takes when nothing else runs, on the faster of the two. Tandem is promised to keep P99 TPOT and TTFT of
chat at a third of what the naive pair's first slice showed: what it may take is said to it with each
request, what it takes is measured. A run is some slices with a promise and a deadline of its own, since
the speed of a shared machine wanders; medians of the runs are told, and the runs: the 99th percentile of a
few hundred chats is a matter of luck. All of it runs in one session, as if started from one shell, and
where the system lets us before whatever else the machine does, the client first: it stands for other
machines.

    python -m benchmark_control_plane.experiments.collocation.interference
        [--rates 5 15] [--chat-words 40] [--burst-interval 1.5]
        [--runs 3] [--models EXPERIMENT.yaml] [--promise 0.333] > RESULT.json

`--models` takes the section `live` of an experiment: both stacks serve its models, on its devices. A third of
what the naive pair takes may be less than a model needs by itself: then `--promise` a larger part, above
what `alone` shows.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from benchmark_control_plane.common.arguments import exit_status
from benchmark_control_plane.common.http_client import Connections
from benchmark_control_plane.common.machine_load import cpu_snapshot, others_cores, raise_session
from benchmark_control_plane.common.servers import stop_as_interrupted
from benchmark_control_plane.experiments.collocation.server_pairs import Stack, both_stacks, models_of

CHAT_WORDS = 40
OUTPUT_TOKENS = 64
PASSAGES = 32
PASSAGE_WORDS = 200
BURST_SECONDS = 1.5
DEADLINE_FACTOR = 3.0
# Slices of a run before which the same chats are played without the bursts: a 99th percentile asks for many.
_ALONE = 2
_WARMING_CHATS = 8
_NO_HURRY = 60.0
_CLIENT_NICE, _SESSION_NICE = -10, -20
# Each is one token for MiniLM, so a passage of 200 words is 202 tokens.
_WORDS = (
    "time", "people", "water", "house", "light", "paper", "music", "street", "garden", "river", "mountain",
    "winter", "summer", "morning", "evening", "letter", "story", "window", "market", "bridge", "forest",
    "animal", "engine", "number", "system", "memory", "group", "table", "school", "family",
)  # fmt: skip


@dataclass
class CollocationLatencies:
    """Seconds, one entry a request; bursts as (latency or None if it failed)."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    bursts: list[float | None] = field(default_factory=list)
    chat_failed: int = 0
    burst_seconds: float = 0.0


@dataclass(frozen=True)
class CollocationLoad:
    """Chats arrive open-loop, each with a prompt of so many words; bursts at a fixed interval, in seconds.
    Tandem is promised to keep `promised_part` of what the naive pair takes."""

    chats_per_second: float
    chat_words: int
    burst_interval: float
    promised_part: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[5.0, 15.0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=14.0)
    parser.add_argument("--chat-words", type=int, default=CHAT_WORDS)
    parser.add_argument("--burst-interval", type=float, default=BURST_SECONDS)
    parser.add_argument("--naive-threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--models", type=Path, help="an experiment whose section live names them")
    parser.add_argument("--promise", type=float, default=1 / 3, help="part of the naive pair's P99")
    return exit_status(lambda: _measured(parser.parse_args(arguments)))


def _measured(options: argparse.Namespace) -> int:
    live = models_of(options.models)
    stop_as_interrupted()
    with both_stacks(live, options.naive_threads) as stacks:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _CLIENT_NICE)
        raise_session(os.getpid(), _SESSION_NICE)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            loads = [
                CollocationLoad(rate, options.chat_words, options.burst_interval, options.promise)
                for rate in options.rates
            ]
            report = runner.run(measure(stacks, loads, options.runs, options.slices, options.seconds))
    json.dump(report, sys.stdout, indent=2)
    print()
    return 0


async def measure(
    stacks: Sequence[Stack], loads: Sequence[CollocationLoad], runs: int, slices: int, seconds: float
) -> dict[str, object]:
    for stack in stacks:
        await _warm(stack)
    report: dict[str, object] = {
        "workload": {
            "chat_words": loads[0].chat_words, "output_tokens": OUTPUT_TOKENS,
            "passages": PASSAGES, "passage_words": PASSAGE_WORDS,
            "burst_interval_s": loads[0].burst_interval, "runs": runs, "slices": slices, "slice_s": seconds,
            "promised_part": loads[0].promised_part, "chat_model": stacks[0].chat_model,
            "embedding_model": stacks[0].embedding_model,
        },
    }  # fmt: skip
    for load in loads:
        found = []
        for number in range(runs):
            turns = range(number * slices, (number + 1) * slices)
            found.append(await _run(stacks, load, turns, seconds))
            print(json.dumps(found[-1], indent=1), file=sys.stderr)
        report[f"chat_{load.chats_per_second:g}_per_s"] = {**_medians(found), "runs": found}
    return report


async def _run(
    stacks: Sequence[Stack], load: CollocationLoad, turns: range, seconds: float
) -> dict[str, Any]:
    before = cpu_snapshot()
    unloaded = await _unloaded(stacks)
    deadline = DEADLINE_FACTOR * min(unloaded.values())
    seen = {stack.name: CollocationLatencies() for stack in stacks}
    alone = {stack.name: CollocationLatencies() for stack in stacks}
    promised: dict[str, float] = {}
    play = partial(_slice, load=load, deadline=deadline)
    for turn, seed in enumerate(turns):
        for stack in stacks if turn % 2 == 0 else stacks[::-1]:
            if turn < _ALONE:
                await play(stack, alone[stack.name], {}, seconds=seconds, seed=seed, bursts=False)
            await play(stack, seen[stack.name], promised, seconds=seconds, seed=seed, bursts=True)
            promised = promised or _part_of(seen[stack.name], load.promised_part)
    found = {name: _figures(one, deadline) for name, one in seen.items()}
    return {
        "unloaded_burst_s": unloaded,
        "burst_deadline_s": deadline,
        "promised": promised,
        "alone": {name: _chat_figures(one) for name, one in alone.items()},
        **found,
        "cores_busy_with_others": others_cores(before, cpu_snapshot()),
        "tandem_over_naive": {
            key: found["tandem"][key] / found["naive"][key]
            for key in ("p99_tpot_ms", "p99_ttft_ms", "p99_gap_ms", "passages_per_s")
        },
    }


def _medians(runs: Sequence[Any]) -> Any:
    """Of figures at the same place of each run."""
    if isinstance(runs[0], Mapping):
        return {key: _medians([run[key] for run in runs]) for key in runs[0]}
    return statistics.median(runs)


async def _warm(stack: Stack) -> None:
    rng, seen = random.Random(1), CollocationLatencies()
    async with stack.connected() as (chat, embeddings):
        for _ in range(_WARMING_CHATS):
            await _chat(chat, stack.chat_model, passage(rng, CHAT_WORDS), seen, {}, seed=0)
        await _burst(embeddings, stack.embedding_model, rng, seen, deadline=_NO_HURRY)
    if None in seen.bursts or seen.chat_failed:
        raise RuntimeError(f"{stack.name} failed while nothing else ran")


async def _unloaded(stacks: Sequence[Stack]) -> dict[str, float]:
    """Seconds that a burst takes each of them, the median of some, taken in turn."""
    rng, seen = random.Random(1), {stack.name: CollocationLatencies() for stack in stacks}
    for stack in (*stacks, *stacks[::-1]):
        async with stack.connected() as (_, embeddings):
            for _ in range(2):
                await _burst(embeddings, stack.embedding_model, rng, seen[stack.name], deadline=_NO_HURRY)
    return {name: statistics.median(_done(one)) for name, one in seen.items()}


def _part_of(seen: CollocationLatencies, part: float) -> dict[str, float]:
    return {
        "x-slo-ttft-ms": 1_000 * _quantile(seen.ttft, 0.99) * part,
        "x-slo-tpot-ms": 1_000 * _quantile(seen.tpot, 0.99) * part,
    }


async def _slice(
    stack: Stack,
    seen: CollocationLatencies,
    promised: Mapping[str, float],
    *,
    load: CollocationLoad,
    seconds: float,
    deadline: float,
    seed: int,
    bursts: bool,
) -> None:
    """Arrivals depend on the seed alone; the slice ends when all were answered."""
    rng, loop = random.Random(seed), asyncio.get_running_loop()
    start = loop.time()
    async with stack.connected() as (chat, embeddings):

        async def at(moment: float, work: Any) -> None:
            await asyncio.sleep(start + moment - loop.time())
            await work

        async with asyncio.TaskGroup() as group:
            moment, number = rng.expovariate(load.chats_per_second), 0
            while moment < seconds:
                number += 1
                asked = passage(rng, load.chat_words)
                group.create_task(at(moment, _chat(chat, stack.chat_model, asked, seen, promised, number)))
                moment += rng.expovariate(load.chats_per_second)
            for number in range(int(seconds / load.burst_interval) if bursts else 0):
                burst = _burst(embeddings, stack.embedding_model, rng, seen, deadline)
                group.create_task(at(number * load.burst_interval, burst))
    seen.burst_seconds += loop.time() - start


async def _chat(
    connections: Connections,
    model: str,
    text: str,
    seen: CollocationLatencies,
    promised: Mapping[str, float],
    seed: int,
) -> None:
    """The model may be random: a seed makes both stacks say the same, and not one token for ever."""
    body = {
        "model": model, "messages": [{"role": "user", "content": text}], "max_tokens": OUTPUT_TOKENS,
        "stream": True, "ignore_eos": True, "temperature": 1, "seed": seed,
    }  # fmt: skip
    objectives = {"x-service-class": "interactive", **{name: f"{ms:.2f}" for name, ms in promised.items()}}
    start = time.perf_counter()
    stamps: list[float] = []

    def stamp(part: bytes) -> None:
        if (b'"content":"' in part and b'"content":""' not in part) or b'"finish_reason":"' in part:
            stamps.append(time.perf_counter())

    try:
        await connections.post("/v1/chat/completions", json.dumps(body).encode(), objectives, stamp)
    except (RuntimeError, OSError) as error:
        print(f"chat failed: {error}", file=sys.stderr)
        seen.chat_failed += 1
        return
    seen.ttft.append(stamps[0] - start)
    seen.tpot.append((stamps[-1] - stamps[0]) / (OUTPUT_TOKENS - 1))
    seen.gaps += [after - before for before, after in pairwise(stamps)]


async def _burst(
    connections: Connections, model: str, rng: random.Random, seen: CollocationLatencies, deadline: float
) -> None:
    body = {"model": model, "input": [passage(rng, PASSAGE_WORDS) for _ in range(PASSAGES)]}
    objectives = {"x-service-class": "indexing", "x-slo-e2e-ms": f"{deadline * 1_000:.0f}"}
    sent = json.dumps(body).encode()
    start = time.perf_counter()
    try:
        answer = await connections.post("/v1/embeddings", sent, objectives)
    except (RuntimeError, OSError) as error:
        print(f"burst failed: {error}", file=sys.stderr)
        seen.bursts.append(None)
        return
    seen.bursts.append(time.perf_counter() - start)
    if answer.count(b'"index"') != PASSAGES:
        raise RuntimeError(f"{answer.count(b'index')} vectors for {PASSAGES} passages")


def passage(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


def _figures(seen: CollocationLatencies, deadline: float) -> dict[str, float]:
    done = _done(seen)
    return {
        **_chat_figures(seen),
        "bursts": len(seen.bursts),
        "burst_attainment": sum(took <= deadline for took in done) / len(seen.bursts),
        "median_burst_s": statistics.median(done),
        "p99_burst_s": _quantile(done, 0.99),
        "passages_per_s": PASSAGES * len(done) / seen.burst_seconds,
    }


def _done(seen: CollocationLatencies) -> list[float]:
    return [took for took in seen.bursts if took is not None]


def _chat_figures(seen: CollocationLatencies) -> dict[str, float]:
    return {
        "chats": len(seen.ttft),
        "chats_failed": seen.chat_failed,
        "p50_ttft_ms": 1_000 * statistics.median(seen.ttft),
        "p99_ttft_ms": 1_000 * _quantile(seen.ttft, 0.99),
        "p50_tpot_ms": 1_000 * statistics.median(seen.tpot),
        "p99_tpot_ms": 1_000 * _quantile(seen.tpot, 0.99),
        "p99_gap_ms": 1_000 * _quantile(seen.gaps, 0.99),
    }


def _quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


if __name__ == "__main__":
    raise SystemExit(main())
