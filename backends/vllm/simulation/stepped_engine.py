"""How does a vLLM engine run without waiting for it? Stepped in this process, on a virtual clock.

A real EngineCore on the no-model executor. Arrivals are injected when the clock has reached them; each
step moves the clock on by what the step-time model says. Before every run the core is given a new
scheduler, so that one engine serves thousands of runs.

Making one imports vLLM, which takes seconds.
"""

import atexit
import gc
import json
import logging
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GEOMETRY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
    "intermediate_size": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "vocab_size": 2_048,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip

# Layers, KV heads, head size. The executor has no weights, so only what the KV cache sees matters.
GEOMETRIES: Mapping[str, tuple[int, int, int]] = {"opt-13b": (40, 40, 128), "llama-3-8b": (32, 8, 128)}


@dataclass(frozen=True, slots=True)
class Setup:
    geometry: str = "opt-13b"
    blocks: int = 709
    block_tokens: int = 16
    max_model_tokens: int = 2_048
    max_running: int = 256
    max_step_tokens: int = 2_048
    batch_time: str = "opt-13b-a100-40g"
    is_async: bool = False
    hidden: bool = False
    """Whether requests may keep hidden states; `restart` says what they cost."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What a token and a request on hidden states add to a decode step, in seconds, and having any at all.
    A token of theirs is restored in `restore_seconds`: once when its request leaves them, and for every
    further chunk of a prompt."""

    token_seconds: float
    request_seconds: float
    step_seconds: float
    restore_seconds: float = 0.0
    forms: str = "auto"

    @property
    def price(self) -> tuple[float, float, float]:
        return (self.token_seconds, self.request_seconds, self.step_seconds)


def begin_anew(core: Any, make: Callable[..., Any], *, is_async: bool) -> Any:
    """The scheduler that `make` makes, given to an engine that has no requests; whether the engine is a step
    ahead of its output is decided anew too. vLLM allows that on no CPU, though the model, not being asked
    to overlap anything, computes the same there."""
    old = core.scheduler
    config = old.vllm_config
    config.scheduler_config.async_scheduling = is_async
    core.batch_queue_size = 2 if is_async else 1
    # Steps that are still in flight are of requests that the new scheduler does not know.
    core.batch_queue = deque(maxlen=core.batch_queue_size) if is_async else None
    core.step_fn = core.step_with_batch_queue if is_async else core.step
    core.scheduler = make(
        vllm_config=config,
        kv_cache_config=old.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=old.block_size,
        hash_block_size=old.hash_block_size,
        log_stats=old.log_stats,
    )
    return core.scheduler


class SteppedEngine:
    """`now_ns` is virtual time. One instance a process and setup: vLLM keeps global state."""

    def __init__(self, setup: Setup) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        layers, heads, head_size = GEOMETRIES[setup.geometry]
        with tempfile.TemporaryDirectory() as folder:
            model = _GEOMETRY | {
                "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
                "head_dim": head_size, "hidden_size": heads * head_size,
                "max_position_embeddings": setup.max_model_tokens,
            }  # fmt: skip
            Path(folder, "config.json").write_text(json.dumps(model), encoding="utf-8")
            config = EngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                max_model_len=setup.max_model_tokens,
                block_size=setup.block_tokens,
                # One block is a placeholder.
                num_gpu_blocks_override=setup.blocks + 1,
                max_num_seqs=setup.max_running,
                max_num_batched_tokens=setup.max_step_tokens,
                enable_prefix_caching=False,
                load_format="dummy",
                distributed_executor_backend="backends.vllm.simulation.executor.SimExecutor",
                additional_config={
                    "tandem_sim": {
                        "batch_time": setup.batch_time,
                        "clock": "virtual",
                        "hidden_seconds": (0.0, 0.0, 0.0, 0.0) if setup.hidden else None,
                    }
                },
            ).create_engine_config()
            self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        # It froze all that was there, and what is frozen at the end counts as leaked: pages of warnings.
        atexit.register(gc.unfreeze)
        self.setup = setup
        self._executor = self.core.model_executor

    @property
    def now_ns(self) -> int:
        now: int = self._executor.now_ns
        return now

    def jump(self, to_ns: int) -> None:
        self._executor.jump(to_ns)

    def restart(
        self,
        *,
        stock: str = "fcfs",
        tandem: Mapping[str, Any] | None = None,
        hidden: HiddenStates | None = None,
    ) -> Any:
        """A new scheduler at time 0: vLLM's own under its policy `stock`, or Tandem's with these options,
        whose requests may keep hidden states if `hidden` says what they cost."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler, SchedulingPolicy

        from backends.vllm import scheduler as plain

        config = self.core.scheduler.vllm_config
        config.scheduler_config.policy = SchedulingPolicy(stock).value
        config.additional_config["tandem"] = dict(tandem or {})
        make: Callable[..., Any] = plain.make
        if hidden is not None:
            from backends.vllm.hybrid import scheduling

            make = scheduling.make
            config.additional_config["tandem_hybrid"] = {"forms": hidden.forms, "price": hidden.price}
            self._executor.hidden_seconds = (*hidden.price, hidden.restore_seconds)
        self._executor.reset_clock()
        if tandem is None:
            make = AsyncScheduler if self.setup.is_async else Scheduler
        scheduler = begin_anew(self.core, make, is_async=self.setup.is_async)
        if tandem is not None:
            scheduler.clock = lambda: self._executor.now_ns
        return scheduler

    def add(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        *,
        extra: Mapping[str, Any],
        priority: int = 0,
        limit: int | None = None,
    ) -> None:
        """The answer has `output_tokens`; `limit`, if given, is all that the scheduler may know of that."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        from backends.vllm.simulation.executor import OUTPUT_TOKENS, STOP_TOKEN

        params = SamplingParams(
            max_tokens=output_tokens if limit is None else limit,
            ignore_eos=True,
            stop_token_ids=None if limit is None else [STOP_TOKEN],
            detokenize=False,
            extra_args={**extra, OUTPUT_TOKENS: output_tokens},
        )
        at = self.now_ns / 1e9
        self.core.scheduler.add_request(
            Request(request_id, [5] * prompt_tokens, params, None, arrival_time=at, priority=priority)
        )

    def abort(self, request_ids: list[str]) -> None:
        self.core.abort_requests(request_ids)

    def step(self) -> list[tuple[str, int, bool]]:
        """(request, new tokens, finished?) of all that produced something."""
        outputs, _ = self.core.step_fn()
        if not outputs:
            return []
        return [
            (one.request_id, len(one.new_token_ids), one.finish_reason is not None)
            for group in outputs.values()
            for one in group.outputs
        ]


logging.getLogger("vllm").setLevel(logging.ERROR)
