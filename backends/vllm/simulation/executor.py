"""A vLLM executor that replaces the forward pass by a latency model.

    distributed_executor_backend="backends.vllm.simulation.executor.SimExecutor"

EngineCore, scheduler and KV-cache manager are vLLM's own, so counts, order and timing are real; the contents
of the cache are not simulated. `additional_config["tandem_sim"]` has these keys:

- `batch_time`: latency model, see backends.cost_models.step_time;
- `clock`: `real` sleeps in a thread, for a live server; `virtual` advances `now_ns` and returns at once, for
  an engine stepped in this process;
- `hidden_seconds`: allows hidden states at this cost in seconds: [per token, per request, per step with any,
  per restored token].
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
# Key in a request's `extra_args`: number of output tokens after which the stop token is sampled. `max_tokens`
# would reveal the output length to the scheduler.
OUTPUT_TOKENS = "sim_output_tokens"
_KV_BYTES = 32 << 30


class SimExecutor(Executor):  # type: ignore[misc]
    """Executor without a model: samples fixed tokens after the time that the latency model predicts."""

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

    # --- start-up ----------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Returns what vLLM asks workers for at start-up; None for all other methods."""
        replies = {
            "get_supported_tasks": ("generate",),
            "determine_available_memory": _KV_BYTES,
            "get_kv_cache_spec": self._kv_cache_spec(),
            "get_supported_kv_cache_layouts": _layouts(),
        }
        reply = [replies.get(str(method))]
        return _completed(reply) if non_block else reply

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
        """Does nothing: there is no cache to allocate."""

    def compile_or_warm_up_model(self) -> None:
        """Does nothing: there is no model."""

    def check_health(self) -> None:
        """Does nothing: there is no worker."""

    def shutdown(self) -> None:
        """Stops the timing thread."""
        self._thread.shutdown(wait=False)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Always true."""
        return True

    # --- one step ----------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Starts the step; `sample_tokens` returns its output, as in vLLM."""
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
        """A future of the output; steps run one after the other, and waiting for it advances the clock."""
        self._busy_until_ns = ends_ns = max(self.now_ns, self._busy_until_ns) + took_ns
        return _VirtualFuture(output, partial(self.jump, ends_ns))

    def jump(self, to_ns: int) -> None:
        """Advances the virtual clock to `to_ns`, never backwards."""
        self.now_ns = max(to_ns, self.now_ns)

    def reset_clock(self) -> None:
        """Sets the virtual clock to 0, with no step in flight."""
        self.now_ns = self._busy_until_ns = 0

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:  # noqa: FBT001, FBT002
        """The output of the step that `execute_model` started."""
        future, self._pending = self._pending, None
        assert future is not None
        return future if non_block else future.result()

    def _step(self, scheduled: Any) -> tuple[ModelRunnerOutput, float]:
        """Output and duration in seconds of a step.

        A token depends only on its position, so a preempted request generates the same tokens again.
        """
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
        # A finished request has no entry any more; it decoded.
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
    """A completed future that calls `on_result` when its result is read."""

    def __init__(self, output: ModelRunnerOutput, on_result: Callable[[], None]) -> None:
        super().__init__()
        self._on_result = on_result
        self.set_result(output)

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Advances the clock, then returns the output."""
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
    """Simulates a forward pass: sleeps, then returns `output`."""
    time.sleep(seconds)
    return output
