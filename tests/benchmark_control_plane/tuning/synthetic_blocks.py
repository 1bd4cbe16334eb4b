"""Blocks whose results follow from a formula instead of a simulation, for fast tests of the search."""

from concurrent.futures import Executor, Future
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random

from benchmark_control_plane.decision_replay.recorded_device import DeviceCosts
from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from benchmark_control_plane.decision_replay.replayed_requests import RequestResult
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.tuning.blocks import Block
from benchmark_control_plane.tuning.evaluation import BlockResult, Evaluator, digest_of
from benchmark_control_plane.tuning.paired_blocks import PairedBlocks
from benchmark_control_plane.tuning.search_space import search_space
from benchmark_control_plane.tuning.time_budget import TimeBudget

CONTENT = {
    "models": {"chat": {"model": "m"}, "embeddings": [{"model": "e"}]},
    "pool": {"kv_allocator": "kvcached"},
    "classes": {
        "interactive": {"priority": 4, "ttft_ms": 500},
        "batch": {"default": True, "sheddable": False},
    },
    "scheduling": {"priority_head_start_ms": 0},
    "admission": {"max_waiting": 50},
}
WEIGHTS = {"interactive": 5.0, "batch": 1.0}
REQUESTS = 60


def traffic(rows):
    costs = DeviceCosts((0.01, 0.0, 0.0, 0.0), (0.01, 0.0, 0.0))
    config = {"config": CONTENT, "machine": {}}
    return RecordedTraffic(rows, Machine(costs.batch_time()), costs, {}, (), config=config)


def block():
    names = ["interactive", "interactive", "batch"]
    rows = [
        {
            "class": names[n % 3],
            "kind": "generate",
            "outcome": "met",
            "decisions": [],
            "at": n * 10_000,
            "tenant": "t",
            "id": f"{n}-{n}",
            "prompt_tokens": 8,
            "max_output_tokens": 4,
            "output_tokens": 2,
            "sequences": 1,
        }
        for n in range(REQUESTS)
    ]
    return Block(traffic(rows), 0, REQUESTS)


@dataclass
class Clock:
    """A clock that only replays move."""

    seconds: float = 0.0

    def now(self):
        return self.seconds


class Formula(Executor):
    """Runs no replay: a share `attainment(sections)` of each class is met, and up to 4 points of noise.

    Each replay moves `clock` by `seconds`.
    """

    def __init__(self, attainment, clock=None, seconds=0.01):
        self.attainment, self.replays = attainment, 0
        self.clock, self.seconds = clock or Clock(), seconds

    def submit(self, _replay, number, sections):
        self.replays += 1
        self.clock.seconds += self.seconds
        future = Future()
        noise = Random(f"{number} {digest_of(sections)}").uniform(-0.04, 0.04)
        share = self.attainment(sections)
        if isinstance(share, str):
            future.set_result(BlockResult([], self.seconds, share))
            return future
        draw = Random(number)
        met = [draw.random() < share + noise for _ in range(REQUESTS)]
        found = [RequestResult("met" if each else "late", 1.0) for each in met]
        future.set_result(BlockResult(found, self.seconds))
        return future


def served(content):
    return {name: part for name, part in content.items() if name not in ("models", "pool")}


def paired(pool, file: Path, blocks=27, content=CONTENT):
    evaluator = Evaluator([block()] * blocks, file.open("a", encoding="utf-8"), pool, TimeBudget(inf, 1))
    space = search_space(content, has_quotas=True)
    return PairedBlocks(evaluator, range(blocks), space, WEIGHTS, served)
