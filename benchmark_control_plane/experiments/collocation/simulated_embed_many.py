"""Measures `embed_many` beside chat in virtual time, on one simulated device that both share.

Chat arrives open-loop (Poisson) at `--load` of the rate of a saturated engine. Beside it the batches of
`embed_many`, as its client forms, repeats and paces them, go to the live gate in the class `batch`: with the
client's defaults, and with each number of calls in `--fixed` kept open. Chat arrives until all texts are
embedded. The same as `embed_many` of this folder without sockets and other programs: it shows what admission,
decode pacing and the limits of embedding passes do, and its figures do not depend on the machine.

    python -m benchmark_control_plane.experiments.collocation.simulated_embed_many
        [--load 0.7] [--slots 64] [--texts 20000] [--seeds 0 1 2] [--fixed 1 2 4 8 16 32]
        [--sections JSON] [--results FILE]
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.experiments.collocation.embed_many import FixedConcurrency
from benchmark_control_plane.judge.records import PartialResponse
from benchmark_control_plane.judge.simulated_target import SimulatedTarget, simulated_target
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from benchmark_control_plane.judge.workload import PlannedRequest
from benchmark_control_plane.simulator import virtual_time
from controlplane.api.protocol.requests import Usage
from controlplane.core.request import Kind
from controlplane.sdk.bulk_embedding import BulkEmbedding, OpenBatch, Outcome
from controlplane.sdk.errors import api_error
from controlplane.sdk.replies import Decision, Embeddings
from controlplane.sdk.retries import DEFAULT_RETRIES

# That of configs/bench/simulated-mix-compute.yaml: computing time is short, not memory.
_DEVICE = SimulatedDeviceSection(
    step=(0.0015, 1.2e-05, 8.0e-05, 1.0e-08),
    embedding=(0.003, 1.2e-05),
    kv_memory=64 * 2**20,
    kv_bytes_per_token=2048,
    max_model_tokens=2048,
    max_running=64,
    embed_batch_tokens=8192,
)
_CLASSES = {
    "interactive": {"priority": 2, "ttft_ms": 200, "tpot_ms": 15},
    "batch": {"priority": 0, "sheddable": False, "default": True, "e2e_ms": 600_000},
}
_PROMPT_TOKENS, _OUTPUT_TOKENS = 120, 60
_TEXT_TOKENS = 32
# The client estimates a quarter token per byte.
_TEXT = "x" * (4 * _TEXT_TOKENS)
_SATURATING, _SATURATED_CHATS = 64, 400
_ALONE_SECONDS = 10.0


def _chat(number: int, service_class: str) -> PlannedRequest:
    return PlannedRequest(
        f"chat{number}", 0.0, Kind.GENERATE, service_class,
        prompt_tokens=_PROMPT_TOKENS, output_tokens=_OUTPUT_TOKENS, max_tokens=2 * _OUTPUT_TOKENS,
    )  # fmt: skip


async def _capacity(device: SimulatedDeviceSection, sections: Mapping[str, Any]) -> float:
    """Chats per second of a saturated engine."""
    free, loop = asyncio.Semaphore(_SATURATING), asyncio.get_running_loop()
    async with simulated_target(device, sections, has_gate=True) as target:

        async def one(number: int) -> None:
            async with free:
                await target.send(_chat(number, "batch"), PartialResponse())

        start = loop.time()
        await asyncio.gather(*map(one, range(_SATURATED_CHATS)))
        return _SATURATED_CHATS / (loop.time() - start)


async def _embed_batch(target: SimulatedTarget, batch: OpenBatch) -> Outcome:
    """What the client would get for a batch."""
    tokens = (_TEXT_TOKENS,) * len(batch.texts)
    sent = PlannedRequest(f"texts{batch.start}", 0.0, Kind.EMBED, "batch", lengths=tokens)
    answer = PartialResponse()
    await target.send(sent, answer)
    if answer.status == 200:
        usage = Usage(prompt_tokens=sum(tokens), total_tokens=sum(tokens))
        rows = np.zeros((len(tokens), 1), np.float32)
        return Embeddings(rows, usage, Decision(None, None, None, None))
    # The target does not keep Retry-After, so the client repeats a refused batch after its own backoff.
    error = {"message": "rejected", "type": "overloaded", "param": None, "code": answer.error}
    return api_error(429, json.dumps({"error": error}).encode(), {})


async def _embed_many(target: SimulatedTarget, texts: int, calls: int | None) -> dict[str, float]:
    """The client's loop of `embed_many` on the running event loop; `calls` None for its own number."""
    loop = asyncio.get_running_loop()
    run = BulkEmbedding((_TEXT for _ in range(texts)), "model", {}, DEFAULT_RETRIES)
    if calls is not None:
        run.concurrency = FixedConcurrency(calls)
    open_calls: dict[asyncio.Task[Outcome], OpenBatch] = {}
    start, embedded, refused = loop.time(), 0, 0
    while not run.is_complete:
        for batch, _ in run.due(loop.time()):
            open_calls[asyncio.create_task(_embed_batch(target, batch))] = batch
        wait_s = run.wait_s(loop.time())
        if open_calls:
            await asyncio.wait(open_calls, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(wait_s or 0.0)
        for task in [task for task in open_calls if task.done()]:
            refused += not isinstance(task.result(), Embeddings)
            run.settle(open_calls.pop(task), task.result(), loop.time())
        embedded += sum(len(batch.texts) for batch in run.finished())
    seconds = loop.time() - start
    return {
        "texts_per_s": embedded / seconds,
        "lost": texts - embedded,
        "refused": refused,
        "seconds": seconds,
    }


async def _window(
    device: SimulatedDeviceSection,
    sections: Mapping[str, Any],
    rate: float,
    texts: int,
    calls: int | None,
    *,
    seed: int,
    is_alone: bool,
) -> dict[str, Any]:
    draw, loop = random.Random(seed), asyncio.get_running_loop()
    async with simulated_target(device, sections, has_gate=True) as target:
        beside = None if is_alone else asyncio.create_task(_embed_many(target, texts, calls))
        answers, sending, end = [], [], loop.time() + _ALONE_SECONDS
        while loop.time() < end if beside is None else not beside.done():
            await asyncio.sleep(draw.expovariate(rate))
            answers.append(PartialResponse())
            chat = _chat(len(answers), "interactive")
            sending.append(asyncio.create_task(target.send(chat, answers[-1])))
        await asyncio.gather(*sending)
        outcomes = Counter(map(_outcome, answers))
        return {
            "chats": len(answers),
            "attainment": outcomes["met"] / len(answers),
            "outcomes": dict(outcomes),
            "embedding": None if beside is None else beside.result(),
        }


def _outcome(answer: PartialResponse) -> str:
    """As the objectives of `interactive` judge it."""
    if answer.status != 200:
        return f"rejected: {answer.error}"
    assert answer.sent is not None
    slo = _CLASSES["interactive"]
    ttft_ms = 1_000 * (answer.tokens[0] - answer.sent)
    tpot_ms = 1_000 * (answer.tokens[-1] - answer.tokens[0]) / max(1, len(answer.tokens) - 1)
    late = [name for name, ms in (("ttft", ttft_ms), ("tpot", tpot_ms)) if ms > float(str(slo[f"{name}_ms"]))]
    return f"late: {' '.join(late)}" if late else "met"


def study(options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the seeds by arrangement, and every window."""
    sections = {"classes": _CLASSES, **options.sections}
    device = replace(_DEVICE, max_running=options.slots)
    rate = options.load * (capacity := virtual_time.run(_capacity(device, sections)))
    arrangements: dict[str, tuple[int | None, bool]] = {
        "chat alone": (None, True),
        "embed_many": (None, False),
    }
    arrangements |= {f"{calls} calls": (calls, False) for calls in options.fixed}
    windows: dict[str, list[dict[str, Any]]] = {}
    for name, (calls, is_alone) in arrangements.items():
        for seed in options.seeds:
            run = _window(device, sections, rate, options.texts, calls, seed=seed, is_alone=is_alone)
            windows.setdefault(name, []).append(virtual_time.run(run))
            print(name, json.dumps(windows[name][-1]), file=sys.stderr, flush=True)
    medians = {
        name: {
            "attainment": statistics.median(one["attainment"] for one in found),
            **(
                {
                    key: statistics.median(one["embedding"][key] for one in found)
                    for key in ("texts_per_s", "lost")
                }
                if found[0]["embedding"]
                else {}
            ),
        }
        for name, found in windows.items()
    }
    stated = {name: getattr(options, name) for name in ("load", "slots", "texts", "seeds")}
    return {"capacity_chats_per_s": capacity, **stated, "medians": medians, "windows": windows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--slots", type=int, default=64, help="requests that run at once at most")
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument(
        "--sections", type=json.loads, default={}, help="changed sections of the YAML, as JSON"
    )
    add_results(parser)
    options = parser.parse_args(arguments)
    write_or_print(options.results, study(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
