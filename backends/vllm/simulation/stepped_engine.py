"""A real EngineCore, stepped in this process on a virtual clock with a latency model as the model.

The caller adds requests when the clock reaches their arrival. Each step advances the clock by the predicted
step time. Before every run EngineCore gets a new scheduler, so that one engine serves thousands of runs.

Constructing a `SteppedEngine` imports vLLM, which takes seconds.
"""

import atexit
import gc
import json
import logging
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GEOMETRY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
    "intermediate_size": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "vocab_size": 2_048,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip

# Layers, KV heads, head size. The executor has no weights, so only the shape of the KV cache matters.
OPT_13B = (40, 40, 128)


@dataclass(frozen=True, slots=True)
class SteppedEngineSetup:
    """KV-cache size and limits of a stepped engine."""

    blocks: int = 709
    block_tokens: int = 16
    max_model_tokens: int = 2_048
    max_running: int = 256
    max_step_tokens: int = 2_048
    batch_time: str = "opt-13b-a100-40g"
    is_async: bool = False
    hidden: bool = False
    """Whether requests may be on hidden states; `restart` sets their cost."""
    shares_prefixes: bool = False
    """Whether requests use vLLM's prefix cache."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Seconds that hidden states add to a decode step, and the rule by which requests use them.

    Attributes:
        token_seconds: per token on hidden states.
        request_seconds: per request on hidden states.
        step_seconds: per step with any such request.
        restore_seconds: per token restored, when its request leaves hidden states and for each further chunk
            of a prompt.
        forms: a key of `hybrid.scheduling.FORMS`.
    """

    token_seconds: float
    request_seconds: float
    step_seconds: float
    restore_seconds: float = 0.0
    forms: str = "auto"

    @property
    def price(self) -> tuple[float, float, float]:
        """Seconds per token, request and step."""
        return (self.token_seconds, self.request_seconds, self.step_seconds)


def replace_scheduler(core: Any, make: Callable[..., Any], *, is_async: bool) -> Any:
    """Replaces the scheduler of an EngineCore without requests by one from `make`, and returns it.

    `is_async` selects synchronous or asynchronous scheduling. vLLM disables the latter on CPUs, but without
    overlap the model computes the same.
    """
    old = core.scheduler
    config = old.vllm_config
    config.scheduler_config.async_scheduling = is_async
    core.batch_queue_size = 2 if is_async else 1
    # Drops steps in flight: their requests are unknown to the new scheduler.
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
    """An EngineCore with virtual time `now_ns`; one per process and setup, as vLLM keeps global state."""

    def __init__(self, setup: SteppedEngineSetup) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        layers, heads, head_size = OPT_13B
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
                # vLLM reserves one block as the null block.
                num_gpu_blocks_override=setup.blocks + 1,
                max_num_seqs=setup.max_running,
                max_num_batched_tokens=setup.max_step_tokens,
                enable_prefix_caching=setup.shares_prefixes,
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
        # EngineCore calls gc.freeze, and objects frozen at exit are reported as leaked.
        atexit.register(gc.unfreeze)
        self.setup = setup
        self._executor = self.core.model_executor

    @property
    def now_ns(self) -> int:
        """Virtual time since the last `restart`."""
        now: int = self._executor.now_ns
        return now

    def jump(self, to_ns: int) -> None:
        """Advances the virtual clock to `to_ns`, never backwards."""
        self._executor.jump(to_ns)

    def restart(
        self,
        *,
        stock: str = "fcfs",
        tandem: Mapping[str, Any] | None = None,
        hidden: HiddenStates | None = None,
    ) -> Any:
        """Installs a new scheduler at time 0 and returns it.

        Args:
            stock: scheduling policy of vLLM's own scheduler, used if `tandem` is None.
            tandem: options of Tandem's scheduler.
            hidden: cost of hidden states; None allows only keys and values.
        """
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
        scheduler = replace_scheduler(self.core, make, is_async=self.setup.is_async)
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
        prompt: Sequence[int] | None = None,
    ) -> None:
        """Adds a request that generates `output_tokens`; the scheduler sees only `limit`, if it is given.

        The prompt is `prompt`, or `prompt_tokens` equal tokens.
        """
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
        token_ids = [5] * prompt_tokens if prompt is None else list(prompt)
        hasher = self.core.request_block_hasher
        self.core.scheduler.add_request(
            Request(
                request_id, token_ids, params, None,
                arrival_time=at, priority=priority, block_hasher=hasher,
            )
        )  # fmt: skip

    def abort(self, request_ids: list[str]) -> None:
        """Aborts the requests."""
        self.core.abort_requests(request_ids)

    def step(self) -> list[tuple[str, int, bool]]:
        """Runs one step; returns (request id, new tokens, is finished) of each request with output."""
        outputs, _ = self.core.step_fn()
        if not outputs:
            return []
        return [
            (output.request_id, len(output.new_token_ids), output.finish_reason is not None)
            for group in outputs.values()
            for output in group.outputs
        ]


logging.getLogger("vllm").setLevel(logging.ERROR)
