"""Measures the interference between a chat and an embedding tenant: two independent servers against Tandem.

The naive pair is vLLM's own server and `plain_embeddings`, neither configured for the other. Tandem serves
the same two models behind one gate. Chat arrives open-loop (Poisson); a burst of passages arrives in one
request at a fixed interval. Latencies count from the planned send time. Both stacks stay up; slices of the
same arrivals go to them alternately (A B B A), and their requests are pooled. The deadline of a burst is
three times its latency on an otherwise idle machine, on the faster stack. Tandem's objectives for chat,
sent with each request, are halfway between the P99 TTFT and P99 TPOT of the naive pair's first slice without
bursts and those of its first slice with them: a scheduler can reach no less than the former, and the latter
is to be improved. A run is several slices with their own objectives and deadline, since the speed of a shared
machine varies; the report holds the medians of the runs and the runs, because a 99th percentile of a few
hundred chats varies. All processes run in one session, as if started from one shell, and with raised priority
where that is permitted; the client comes first, since it represents other machines.

    python -m benchmark_control_plane.experiments.collocation.interference
        [--rates 5 15] [--chat-words 40] [--burst-interval 1.5]
        [--runs 3] [--models EXPERIMENT.yaml] > RESULT.json

`--models` takes the section `live` of an experiment: both stacks serve its models, on its devices.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from benchmark_control_plane.common.command_line import exit_status
from benchmark_control_plane.common.distributions import nearest_rank
from benchmark_control_plane.common.http_client import Connections
from benchmark_control_plane.common.machine_load import cpu_snapshot, others_cores, raise_session
from benchmark_control_plane.common.servers import interrupt_on_sigterm
from benchmark_control_plane.experiments.collocation.server_pairs import Stack, both_stacks, models_of

CHAT_WORDS = 40
OUTPUT_TOKENS = 64
PASSAGES = 32
PASSAGE_WORDS = 200
BURST_SECONDS = 1.5
DEADLINE_FACTOR = 3.0
# Slices of a run that are preceded by the same chats without bursts; a 99th percentile needs many chats.
_ALONE = 2
_WARMING_CHATS = 8
_LOOSE_DEADLINE = 60.0
_CLIENT_NICE, _SESSION_NICE = -10, -20
# Each word is one token for MiniLM, so a passage of 200 words has 202 tokens.
_WORDS = (
    "time", "people", "water", "house", "light", "paper", "music", "street", "garden", "river", "mountain",
    "winter", "summer", "morning", "evening", "letter", "story", "window", "market", "bridge", "forest",
    "animal", "engine", "number", "system", "memory", "group", "table", "school", "family",
)  # fmt: skip


@dataclass
class CollocationLatencies:
    """Latencies in seconds, one entry per request; a failed burst is None."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    bursts: list[float | None] = field(default_factory=list)
    chat_failed: int = 0
    burst_seconds: float = 0.0


@dataclass(frozen=True)
class CollocationLoad:
    """One workload: chats with prompts of `chat_words`, and a burst every `burst_interval` seconds."""

    chats_per_second: float
    chat_words: int
    burst_interval: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[5.0, 15.0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=14.0)
    parser.add_argument("--chat-words", type=int, default=CHAT_WORDS)
    parser.add_argument("--burst-interval", type=float, default=BURST_SECONDS)
    parser.add_argument("--naive-threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--models", type=Path, help="experiment with the models in its section live")
    parser.add_argument(
        "--no-idle-class",
        action="store_true",
        help="run Tandem's embedding worker in the normal scheduling class, as the naive pair's",
    )
    return exit_status(lambda: _run_all(parser.parse_args(arguments)))


def _run_all(options: argparse.Namespace) -> int:
    live = models_of(options.models)
    if options.no_idle_class:
        live = replace(live, embedding=replace(live.embedding, idle_cpu_priority=False))
    interrupt_on_sigterm()
    with both_stacks(live, options.naive_threads) as stacks:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _CLIENT_NICE)
        raise_session(os.getpid(), _SESSION_NICE)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            loads = [
                CollocationLoad(rate, options.chat_words, options.burst_interval) for rate in options.rates
            ]
            report = runner.run(measure(stacks, loads, options.runs, options.slices, options.seconds))
    json.dump(report, sys.stdout, indent=2)
    print()
    return 0


async def measure(
    stacks: Sequence[Stack], loads: Sequence[CollocationLoad], runs: int, slices: int, seconds: float
) -> dict[str, object]:
    """The report: the workload, and for each load the medians of the runs and the runs."""
    for stack in stacks:
        await _warm(stack)
    report: dict[str, object] = {
        "workload": {
            "chat_words": loads[0].chat_words, "output_tokens": OUTPUT_TOKENS,
            "passages": PASSAGES, "passage_words": PASSAGE_WORDS,
            "burst_interval_s": loads[0].burst_interval, "runs": runs, "slices": slices, "slice_s": seconds,
            "chat_model": stacks[0].chat_model, "embedding_model": stacks[0].embedding_model,
        },
    }  # fmt: skip
    for load in loads:
        found = []
        for number in range(runs):
            seeds = range(number * slices, (number + 1) * slices)
            found.append(await _run(stacks, load, seeds, seconds))
            print(json.dumps(found[-1], indent=1), file=sys.stderr)
        report[f"chat_{load.chats_per_second:g}_per_s"] = {**_medians(found), "runs": found}
    return report


async def _run(
    stacks: Sequence[Stack], load: CollocationLoad, seeds: range, seconds: float
) -> dict[str, Any]:
    before = cpu_snapshot()
    unloaded = await _unloaded(stacks)
    deadline = DEADLINE_FACTOR * min(unloaded.values())
    seen = {stack.name: CollocationLatencies() for stack in stacks}
    alone = {stack.name: CollocationLatencies() for stack in stacks}
    objectives: dict[str, float] = {}
    play = partial(_slice, load=load, deadline=deadline)
    for number, seed in enumerate(seeds):
        for stack in stacks if number % 2 == 0 else stacks[::-1]:
            if number < _ALONE:
                await play(stack, alone[stack.name], {}, seconds=seconds, seed=seed, bursts=False)
            await play(stack, seen[stack.name], objectives, seconds=seconds, seed=seed, bursts=True)
            objectives = objectives or _objectives(alone[stack.name], seen[stack.name])
    found = {name: _figures(latencies, deadline, objectives) for name, latencies in seen.items()}
    return {
        "unloaded_burst_s": unloaded,
        "burst_deadline_s": deadline,
        "objectives": objectives,
        "alone": {name: _chat_figures(latencies) for name, latencies in alone.items()},
        **found,
        "cores_busy_with_others": others_cores(before, cpu_snapshot()),
        "tandem_over_naive": {
            key: found["tandem"][key] / found["naive"][key]
            for key in ("p99_tpot_ms", "p99_ttft_ms", "p99_gap_ms", "passages_per_s")
        },
    }


def _medians(runs: Sequence[Any]) -> Any:
    """Median over the runs of each figure, keeping the nesting of their dictionaries."""
    if isinstance(runs[0], Mapping):
        return {key: _medians([run[key] for run in runs]) for key in runs[0]}
    return statistics.median(runs)


async def _warm(stack: Stack) -> None:
    rng, seen = random.Random(1), CollocationLatencies()
    async with stack.connected() as (chat, embeddings):
        for _ in range(_WARMING_CHATS):
            await _chat(chat, stack.chat_model, passage(rng, CHAT_WORDS), seen, {}, 0, time.perf_counter())
        await _burst(embeddings, stack.embedding_model, rng, seen, _LOOSE_DEADLINE, time.perf_counter())
    if None in seen.bursts or seen.chat_failed:
        raise RuntimeError(f"{stack.name}: a warm-up request failed on an idle machine; see its log")


async def _unloaded(stacks: Sequence[Stack]) -> dict[str, float]:
    """Median latency of a burst on each stack in seconds, with no other load, measured alternately."""
    rng, seen = random.Random(1), {stack.name: CollocationLatencies() for stack in stacks}
    for stack in (*stacks, *stacks[::-1]):
        async with stack.connected() as (_, embeddings):
            for _ in range(2):
                due = time.perf_counter()
                await _burst(embeddings, stack.embedding_model, rng, seen[stack.name], _LOOSE_DEADLINE, due)
    return {name: statistics.median(_done(latencies)) for name, latencies in seen.items()}


def _objectives(alone: CollocationLatencies, seen: CollocationLatencies) -> dict[str, float]:
    """Request headers with objectives halfway between the P99 latencies of chat alone and beside bursts."""
    return {
        "x-slo-ttft-ms": 500 * (nearest_rank(alone.ttft, 0.99) + nearest_rank(seen.ttft, 0.99)),
        "x-slo-tpot-ms": 500 * (nearest_rank(alone.tpot, 0.99) + nearest_rank(seen.tpot, 0.99)),
    }


async def _slice(
    stack: Stack,
    seen: CollocationLatencies,
    objectives: Mapping[str, float],
    *,
    load: CollocationLoad,
    seconds: float,
    deadline: float,
    seed: int,
    bursts: bool,
) -> None:
    """Runs one slice; its arrivals depend on the seed alone, and it ends with the last response."""
    rng, start = random.Random(seed), time.perf_counter()
    async with stack.connected() as (chat, embeddings):

        async def at(moment: float, send: Callable[[float], Awaitable[None]]) -> None:
            await asyncio.sleep(start + moment - time.perf_counter())
            await send(start + moment)

        async with asyncio.TaskGroup() as group:
            moment, number = rng.expovariate(load.chats_per_second), 0
            while moment < seconds:
                number += 1
                prompt = passage(rng, load.chat_words)
                send = partial(_chat, chat, stack.chat_model, prompt, seen, objectives, number)
                group.create_task(at(moment, send))
                moment += rng.expovariate(load.chats_per_second)
            for number in range(int(seconds / load.burst_interval) if bursts else 0):
                burst = partial(_burst, embeddings, stack.embedding_model, rng, seen, deadline)
                group.create_task(at(number * load.burst_interval, burst))
    seen.burst_seconds += time.perf_counter() - start


async def _chat(
    connections: Connections,
    model: str,
    text: str,
    seen: CollocationLatencies,
    objectives: Mapping[str, float],
    seed: int,
    due: float,
) -> None:
    """Sends one chat. Sampling with a seed gives equal outputs on both stacks, even with random weights."""
    body = {
        "model": model, "messages": [{"role": "user", "content": text}], "max_tokens": OUTPUT_TOKENS,
        "stream": True, "ignore_eos": True, "temperature": 1, "seed": seed,
    }  # fmt: skip
    headers = {"x-service-class": "interactive", **{name: f"{ms:.2f}" for name, ms in objectives.items()}}
    stamps: list[float] = []

    def stamp(part: bytes) -> None:
        if (b'"content":"' in part and b'"content":""' not in part) or b'"finish_reason":"' in part:
            stamps.append(time.perf_counter())

    try:
        await connections.post("/v1/chat/completions", json.dumps(body).encode(), headers, stamp)
    except (RuntimeError, OSError) as error:
        print(f"chat failed: {error}", file=sys.stderr)
        seen.chat_failed += 1
        return
    seen.ttft.append(stamps[0] - due)
    seen.tpot.append((stamps[-1] - stamps[0]) / (OUTPUT_TOKENS - 1))
    seen.gaps += [after - before for before, after in pairwise(stamps)]


async def _burst(
    connections: Connections,
    model: str,
    rng: random.Random,
    seen: CollocationLatencies,
    deadline: float,
    due: float,
) -> None:
    body = {"model": model, "input": [passage(rng, PASSAGE_WORDS) for _ in range(PASSAGES)]}
    headers = {"x-service-class": "indexing", "x-slo-e2e-ms": f"{deadline * 1_000:.0f}"}
    sent = json.dumps(body).encode()
    try:
        response = await connections.post("/v1/embeddings", sent, headers)
    except (RuntimeError, OSError) as error:
        print(f"burst failed: {error}", file=sys.stderr)
        seen.bursts.append(None)
        return
    seen.bursts.append(time.perf_counter() - due)
    if response.count(b'"index"') != PASSAGES:
        raise RuntimeError(
            f"{response.count(b'index')} vectors for {PASSAGES} passages; one per passage is needed"
        )


def passage(rng: random.Random, words: int) -> str:
    """Random text with the given number of words."""
    return " ".join(rng.choices(_WORDS, k=words))


def _figures(
    seen: CollocationLatencies, deadline: float, objectives: Mapping[str, float]
) -> dict[str, float]:
    done = _done(seen)
    ttft, tpot = (objectives[f"x-slo-{name}-ms"] / 1_000 for name in ("ttft", "tpot"))
    in_time = sum(first <= ttft and each <= tpot for first, each in zip(seen.ttft, seen.tpot, strict=True))
    return {
        **_chat_figures(seen),
        "chat_attainment": in_time / (len(seen.ttft) + seen.chat_failed),
        "bursts": len(seen.bursts),
        "burst_attainment": sum(took <= deadline for took in done) / len(seen.bursts),
        "median_burst_s": statistics.median(done),
        "p99_burst_s": nearest_rank(done, 0.99),
        "passages_per_s": PASSAGES * len(done) / seen.burst_seconds,
    }


def _done(seen: CollocationLatencies) -> list[float]:
    return [took for took in seen.bursts if took is not None]


def _chat_figures(seen: CollocationLatencies) -> dict[str, float]:
    return {
        "chats": len(seen.ttft),
        "chats_failed": seen.chat_failed,
        "p50_ttft_ms": 1_000 * statistics.median(seen.ttft),
        "p99_ttft_ms": 1_000 * nearest_rank(seen.ttft, 0.99),
        "p50_tpot_ms": 1_000 * statistics.median(seen.tpot),
        "p99_tpot_ms": 1_000 * nearest_rank(seen.tpot, 0.99),
        "p99_gap_ms": 1_000 * nearest_rank(seen.gaps, 0.99),
    }


if __name__ == "__main__":
    raise SystemExit(main())
