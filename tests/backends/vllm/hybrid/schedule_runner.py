"""Runs schedules on a real engine in this process and prints the results as JSON.

    python schedule_runner.py MODEL SCHEDULES [compiled]

Outputs are compared token by token and, with the model runner that vLLM uses on CPUs, by all logits of each
token. With TRITON_INTERPRET=1 on a CPU it uses vLLM's model runner for GPUs, with kernels in Triton.

It runs in a process of its own, because vLLM keeps global state and binds threads. `test_outputs` reads the
result.
"""

import json
import logging
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

if os.environ.get("TRITON_INTERPRET") == "1":
    # vLLM and its workers require a Triton that compiles for CPUs, although nothing is compiled here.
    import triton.backends

    active = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=active, compiler=None)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import numpy as np

from backends.bundled_models import resolve
from backends.vllm.hybrid.support import HybridSetup
from controlplane.policy.cache_tiers.selection import TierChoice

BLOCK_TOKENS = 32
AMPLE, SCARCE = 128, 8
# Ten times the steps of the longest schedule.
MOST_STEPS = 5_000
COMMON = {
    "block_size": BLOCK_TOKENS,
    "num_gpu_blocks_override": AMPLE + 1,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": False,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_logprobs": -1,
    "logprobs_mode": "raw_logits",
    # With two engines in one process, workers in processes of their own keep vLLM's global state apart.
    "distributed_executor_backend": "mp",
    # On a GPU both engines must find this share free.
    "gpu_memory_utilization": 0.4,
}


class RandomForms:
    """Chooses forms and conversions at random."""

    def __init__(self, seed, *, hidden, leave):
        self.coin, self.hidden, self.leave = random.Random(seed), hidden, leave

    def __call__(self, view, waiting, hidden, *, rows_per_block, price):
        started = frozenset(p.request.id for p in waiting if self.coin.random() < self.hidden)
        left = frozenset(name for name in sorted(hidden) if self.coin.random() < self.leave)
        return TierChoice(started, left)


@dataclass
class ScheduleResult:
    """Results of one schedule.

    `logits[i]` has a row per token of output i; `became_hidden` counts requests that resumed on hidden states
    after a preemption on keys and values.
    """

    tokens: list
    logits: list
    preempted: int
    converted: int
    became_hidden: int
    most_blocks: list
    leaked: int


class Engine:
    def __init__(self, model, *, hybrid, compiled=False):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        folder = resolve(model)
        arguments = COMMON | {"enforce_eager": not compiled}
        if hybrid:
            from backends.vllm.hybrid import models

            models.register()
            architecture = json.loads(Path(folder, "config.json").read_text())["architectures"][0]
            # Every request that fits starts, so that blocks run short.
            arguments["additional_config"] = {"tandem": {"ordering": "fcfs", "look_ahead": "none"}}
            arguments = HybridSetup(architecture, "on").arguments(arguments)
        config = EngineArgs(model=folder, **arguments).create_engine_config()
        self.mode = config.compilation_config.mode.name
        self.runner = 2 if config.use_v2_model_runner else 1
        if current_platform.is_cpu():
            # No device is in use yet, so workers may fork instead of importing everything again.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)

    def schedule_ahead(self):
        """Switches to asynchronous scheduling: each step is planned before the previous output is known."""
        from backends.vllm.hybrid.scheduling import make
        from backends.vllm.simulation.stepped_engine import replace_scheduler

        replace_scheduler(self.core, make, is_async=True)

    def _add(self, at, prompt, tokens):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        # In the interpreter, the second runner's kernels would take minutes to rank all logits.
        logits = -1 if self.runner == 1 else None
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logits
        )
        self.core.scheduler.add_request(Request(f"r{at}", prompt, sampling, None, arrival_time=float(at)))

    def play(self, requests, *, forms=None, blocks=AMPLE, joins=None, aborts=None):
        """Greedy outputs of `requests` of (prompt, tokens), with a quota of `blocks`.

        `joins` and `aborts` map request numbers to the step at which they arrive or are aborted.
        """
        scheduler, joins, aborts = self.core.scheduler, joins or {}, aborts or {}
        if forms is not None:
            scheduler.choose_tiers = forms
            scheduler.set_quota(blocks)
        outputs = {f"r{at}": [] for at in range(len(requests))}
        logits = {name: [] for name in outputs}
        before = 0 if forms is None else scheduler.preemptions.count
        pool = scheduler.kv_cache_manager.block_pool
        cache = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        converted = became_hidden = 0
        most, plain = [0] * len(requests), set()
        inner = scheduler.schedule

        def recorded(*args, **kwargs):
            nonlocal converted, became_hidden
            output = inner(*args, **kwargs)
            held = cache.req_to_blocks
            if forms is not None:
                converted += len(output.cache_forms.converted)
                holding = {name for name in outputs if held.get(name)}
                became_hidden += len(plain & holding & cache.hidden)
                plain.difference_update(holding & cache.hidden)
                plain.update(holding - cache.hidden)
            most[:] = [max(before, len(held.get(f"r{at}", ()))) for at, before in enumerate(most)]
            return output

        scheduler.schedule = recorded
        step = 0
        while scheduler.has_requests() or self.core.batch_queue or step <= max(joins.values(), default=0):
            for at, (prompt, tokens) in enumerate(requests):
                if joins.get(at, 0) == step:
                    self._add(at, prompt, tokens)
            self.core.abort_requests([f"r{at}" for at, end in aborts.items() if end == step])
            step += 1
            if step > MOST_STEPS:
                raise RuntimeError(f"requests unfinished after {step} steps: {sorted(scheduler.requests)}")
            for group in (self.core.step_fn()[0] or {}).values():
                for one in group.outputs:
                    outputs[one.request_id] += one.new_token_ids
                    if one.new_logprobs is not None:
                        logits[one.request_id] += _by_token(one.new_logprobs)
        scheduler.schedule = inner
        if forms is not None:
            scheduler.set_quota(AMPLE)
            scheduler.balloon.withhold_beyond(AMPLE)
        leaked = AMPLE - pool.get_num_free_blocks()
        preempted = 0 if forms is None else scheduler.preemptions.count - before
        return ScheduleResult(
            list(outputs.values()), list(logits.values()), preempted, converted, became_hidden, most, leaked
        )


def _by_token(reported):
    """Logits by token id; vLLM reports the sampled token first, then all in descending order."""
    rows = []
    for tokens, values in zip(reported.logprob_token_ids, reported.logprobs, strict=True):
        row = np.empty(len(tokens) - 1, np.float32)
        row[tokens[1:]] = values[1:]
        rows.append(row)
    return rows


def _furthest(played, expected):
    """Largest difference of two logits; None without logits. An aborted request has fewer rows."""
    pairs = zip(played, expected, strict=True)
    found = [float(abs(a - b).max()) for one, two in pairs for a, b in zip(one, two, strict=False)]
    return max(found, default=None)


def _requests(seed, count):
    draw = random.Random(seed)
    # Lengths around blocks of 32 tokens, blocks of 64 rows, and the step's budget of 64 tokens.
    sizes = [1, 31, 32, 63, 64, 65, 90, 130]
    return [
        ([draw.randrange(8, 2000) for _ in range(draw.choice(sizes))], draw.randrange(4, 40))
        for _ in range(count)
    ]


def main(model, schedules, *, compiled):
    logging.getLogger("vllm").setLevel(logging.ERROR)
    plain = Engine(model, hybrid=False)
    engine = Engine(model, hybrid=True, compiled=compiled)
    requests = _requests(1, 10)
    all_requests = range(len(requests))
    found = {"mode": engine.mode, "runner": engine.runner}

    def tell(name, played, chosen=all_requests, cut=()):
        """Compares outputs; an aborted request must be a prefix of the expected output."""
        wanted = [expected.tokens[i] for i in chosen]
        pairs = enumerate(zip(played.tokens, wanted, strict=True))
        same = sum(one == (two[: len(one)] if at in cut else two) for at, (one, two) in pairs)
        ended = sum(len(one) < len(two) for one, two in zip(played.tokens, wanted, strict=True))
        off = _furthest(played.logits, [expected.logits[i] for i in chosen])
        summary = {"tokens": None, "logits": off, "same": same, "of": len(wanted), "cut": ended}
        found[name] = {**vars(played), **summary}

    expected = plain.play(requests)
    found["lengths"] = [len(prompt) + tokens for prompt, tokens in requests]
    runs = {
        "all plain": RandomForms(0, hidden=0, leave=0),
        "all hidden": RandomForms(0, hidden=1, leave=0),
        "mixed": RandomForms(0, hidden=0.5, leave=0),
        "leaving": RandomForms(0, hidden=1, leave=0.1),
    }
    for name, forms in runs.items():
        tell(name, engine.play(requests, forms=forms))
    for name in ("mixed", "leaving"):
        played = engine.play(requests, forms=runs[name], blocks=SCARCE)
        tell(f"{name}, scarce", played)

    def at_random(seed):
        draw = random.Random(seed)
        chosen = draw.sample(range(len(requests)), 5)
        forms = RandomForms(seed, hidden=draw.random(), leave=draw.choice([0, 0.05, 0.3]))
        joins = {at: draw.randrange(12) for at in range(1, len(chosen))}
        aborts = {at: draw.randrange(12, 40) for at in range(len(chosen)) if draw.random() < 0.2}
        played = engine.play(
            [requests[i] for i in chosen],
            forms=forms,
            blocks=draw.choice([6, 7, 9]),
            joins=joins,
            aborts=aborts,
        )
        tell(f"schedule {seed}", played, chosen, aborts)

    ahead = schedules // 2
    for seed in range(ahead):
        at_random(seed)
    engine.schedule_ahead()
    tell("leaving, a step ahead", engine.play(requests, forms=runs["leaving"], blocks=SCARCE))
    for seed in range(ahead, schedules):
        at_random(seed)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main(sys.argv[1], int(sys.argv[2]), compiled="compiled" in sys.argv[3:])
