"""What would vLLM do on hardware that is not here? Its real engine, with a latency model for a model.

    distributed_executor_backend="backends.vllm.simulation.executor.SimExecutor"

EngineCore, scheduler and KV manager are vLLM's own; only the forward pass is missing. It checks counts,
order and timing, not the contents of the cache. `additional_config["tandem_sim"]` chooses
`batch_time` (see backends.cost_models.step_time) and `clock`: `real` waits in a thread, for use behind a live
server; `virtual` moves `now_ns` on and returns at once, for an engine stepped in this process. With
`hidden_seconds`, [a token, a request, a step with any, a token restored] requests may keep hidden states at
that extra cost.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from backends.cost_models.step_time import BATCH_TIMES, StepLoad
from controlplane.policy.registry import lookup

_FIRST_TOKEN = 10
_TOKEN_RANGE = 900
_TOKEN_STRIDE = 7_919
STOP_TOKEN = 1
# In a request's `extra_args`: after so many output tokens the stop token appears. `max_tokens` alone would
# tell the scheduler how long the answer is.
OUTPUT_TOKENS = "sim_output_tokens"
_KV_BYTES = 32 << 30


class SimExecutor(Executor):  # type: ignore[misc]
    def _init_executor(self) -> None:
        config: Mapping[str, Any] = (self.vllm_config.additional_config or {}).get("tandem_sim", {})
        self._batch_time = lookup("tandem_sim.batch_time", BATCH_TIMES, config.get("batch_time", "instant"))
        self._is_virtual = lookup(
            "tandem_sim.clock", {"real": False, "virtual": True}, config.get("clock", "real")
        )
        self.hidden_seconds: Sequence[float] | None = config.get("hidden_seconds")
        self.now_ns = self._busy_until_ns = 0
        self._known_tokens: dict[str, int] = {}
        self._computed_tokens: dict[str, int] = {}
        self._stop_at: dict[str, int] = {}
        self._first_block: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[ModelRunnerOutput] | None = None

    # --- what vLLM asks of an executor at start ----------------------------------------------

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        answers = {
            "get_supported_tasks": ("generate",),
            "determine_available_memory": _KV_BYTES,
            "get_kv_cache_spec": self._kv_cache_spec(),
            "get_supported_kv_cache_layouts": _layouts(),
        }
        answer = [answers.get(str(method))]
        return _completed(answer) if non_block else answer

    def _kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        model, parallel = self.model_config, self.parallel_config
        shape = {
            "block_size": self.cache_config.block_size,
            "num_kv_heads": model.get_num_kv_heads(parallel),
            "head_size": model.get_head_size(),
            "dtype": torch.bfloat16,
        }
        if self.hidden_seconds is None:
            spec = FullAttentionSpec(**shape)
        else:
            from backends.vllm.hybrid.cache import HybridSpec

            spec = HybridSpec(**shape, hidden_size=model.get_hidden_size())
        return {f"layers.{i}.attn": spec for i in range(model.get_num_layers(parallel))}

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self._thread.shutdown(wait=False)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    # --- one step ----------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:  # noqa: FBT001, FBT002
        output, took = self._step(scheduler_output)
        if self._is_virtual:
            future = self._virtual_output(output, round(took * 1e9))
        else:
            future = self._thread.submit(partial(_sleep_then_return, took, output))
        if scheduler_output.total_num_scheduled_tokens == 0:
            return future if non_block else future.result()
        self._pending = future
        return _completed(None) if non_block else None

    def _virtual_output(self, output: ModelRunnerOutput, took_ns: int) -> "Future[ModelRunnerOutput]":
        """Steps are computed one after the other, and time moves on when somebody waits for the output."""
        self._busy_until_ns = ends_ns = max(self.now_ns, self._busy_until_ns) + took_ns
        return _VirtualFuture(output, partial(self.jump, ends_ns))

    def jump(self, to_ns: int) -> None:
        self.now_ns = max(to_ns, self.now_ns)

    def reset_clock(self) -> None:
        """Time is 0 again, and nothing is being computed."""
        self.now_ns = self._busy_until_ns = 0

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:  # noqa: FBT001, FBT002
        future, self._pending = self._pending, None
        assert future is not None
        return future if non_block else future.result()

    def _step(self, scheduled: Any) -> tuple[ModelRunnerOutput, float]:
        """The tokens of this step; a token depends on its position alone, so that a preempted request
        repeats itself."""
        self._note_positions(scheduled)
        known, computed = self._known_tokens, self._computed_tokens
        load = StepLoad()
        ids: list[str] = []
        tokens: list[list[int]] = []
        for request_id, new in scheduled.num_scheduled_tokens.items():
            before, length = computed[request_id], known[request_id]
            is_ready = before + new >= length
            if is_ready and new == 1:
                load.decodes += 1
                load.cells += before + 1
            else:
                load.prefill_tokens += new
                load.squares += new * (2 * before + new)
            computed[request_id] = before + new
            ids.append(request_id)
            if is_ready:
                known[request_id] = length + 1
                is_last = self._stop_at.get(request_id) == length + 1
                tokens.append(
                    [STOP_TOKEN if is_last else _FIRST_TOKEN + _TOKEN_STRIDE * length % _TOKEN_RANGE]
                )
            else:
                tokens.append([])
        for request_id in scheduled.finished_req_ids:
            known.pop(request_id, None)
            computed.pop(request_id, None)
            self._stop_at.pop(request_id, None)
            self._first_block.pop(request_id, None)
        if not ids:
            return EMPTY_MODEL_RUNNER_OUTPUT, 0.0
        index = {request_id: at for at, request_id in enumerate(ids)}
        output = ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=tokens)
        return output, self._batch_time(load) + self._hidden_time(scheduled)

    def _hidden_time(self, scheduled: Any) -> float:
        forms = getattr(scheduled, "cache_forms", None)
        if forms is None or self.hidden_seconds is None:
            return 0.0
        token, request, step, restored = self.hidden_seconds
        named = scheduled.num_scheduled_tokens.items()
        hidden = [(name, new) for name, new in named if self._first_block[name] in forms.hidden]
        # Who has finished is forgotten; it decoded.
        decoding = [self._computed_tokens.get(name, 0) for name, new in hidden if new == 1]
        read = sum(self._computed_tokens.get(name, new) - new for name, new in hidden if new > 1)
        moved = read + sum(forms.converted.values())
        took: float = token * sum(decoding) + request * len(decoding) + restored * moved
        return took + step if decoding else took

    def _note_positions(self, scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            self._known_tokens[new.req_id] = len(tokens)
            self._computed_tokens[new.req_id] = new.num_computed_tokens
            self._first_block[new.req_id] = new.block_ids[0][0]
            ends = getattr(new.sampling_params, "extra_args", None) or {}
            if OUTPUT_TOKENS in ends:
                self._stop_at[new.req_id] = len(new.prompt_token_ids) + ends[OUTPUT_TOKENS]
        cached = scheduled.scheduled_cached_reqs
        for request_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            self._computed_tokens[request_id] = computed
            if request_id in cached.resumed_req_ids:
                self._first_block[request_id] = blocks[0][0]
            if request_id in cached.all_token_ids:
                self._known_tokens[request_id] = len(cached.all_token_ids[request_id])


class _VirtualFuture(Future[ModelRunnerOutput]):
    def __init__(self, output: ModelRunnerOutput, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self._on_result = on_wait
        self.set_result(output)

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._on_result()
        return super().result(timeout)


def _layouts() -> list[str]:
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return []
    return [layout.name for layout in KVCacheLayout]


def _completed(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _sleep_then_return(seconds: float, output: Any) -> Any:
    """The forward pass that is not there takes this long."""
    time.sleep(seconds)
    return output
