"""How does one request run in a vLLM engine that is up? Prompt in, deltas out, errors in our words.

Importing this module imports vLLM, which takes seconds; constructing `VllmEngine` takes half a minute or
more and blocks. Both belong off the event loop.
"""

import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from multiprocessing.process import BaseProcess
from typing import Any

from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from backends.vllm.arguments import engine_args, scheduled
from backends.vllm.compat import (
    CLIENT_ERRORS,
    EngineDeadError,
    EngineGenerateError,
    check_release,
    max_running_requests,
)
from backends.vllm.hybrid.support import HybridSetup
from backends.vllm.output_parsing import OutputParser, ParsedConversation, check_parsers
from backends.vllm.plugin.request_metadata import KEY
from backends.vllm.plugin.rpc_client import SchedulerClient
from backends.vllm.plugin.shared_state import open_shared_state
from backends.vllm.process import bound_to_parent, while_alive
from backends.vllm.sampling import sampling_params, structured_outputs, to_delta
from backends.vllm.stats import EngineStats
from backends.vllm.step_cost_prior import step_cost_prior
from backends.vllm.step_watchdog import StepWatchdog, longest_step
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.core.generation import ChatPrompt, Delta, Sampling
from controlplane.core.geometry import KvGeometry, kv_geometry
from controlplane.core.ports import EngineState
from controlplane.policy.engine.options import EngineOptions

log = logging.getLogger(__name__)

_CPP_LOG_PREFIX = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_ENGINE_DIED = "the vLLM engine died; its log says why; restart the server"
_ENGINE_STALLED = (
    "the vLLM engine had requests but took no step for too long and was killed; restart the server"
)
# A step that takes so many times what the longest should is not over any more.
_STALL_FACTOR = 10
# Decides how many tokens a step takes and how many run where nobody says: as in vLLM's own server. Other
# contexts have no numbers for the device at hand, and get those of the smallest.
CONTEXT = UsageContext.OPENAI_API_SERVER


class VllmEngine:
    """`scheduler_client` is None for vLLM's own scheduler.

    Raises ValueError for engine arguments that vLLM does not take, RuntimeError when it cannot start.
    """

    scheduler_client: SchedulerClient | None = None
    is_stalled = False
    """It was taken for dead, and killed."""
    _step_watchdog: StepWatchdog | None = None

    def __init__(
        self,
        model: str,
        served_name: str,
        arguments: Mapping[str, Any],
        tool_parser: str | None,
        reasoning_parser: str | None,
        options: EngineOptions | None,
        hybrid: HybridSetup | None = None,
    ) -> None:
        check_release()
        check_parsers(tool_parser, reasoning_parser)
        if options is not None:
            arguments = scheduled(arguments, options)
        if hybrid is not None:
            arguments = hybrid.arguments(arguments)
            # Its models, which takes loading vLLM's own.
            from backends.vllm.hybrid import models

            models.register()
        given = engine_args(model, served_name, arguments, reasoning_parser=reasoning_parser)
        config = given.create_engine_config(CONTEXT)
        self.stats = EngineStats()
        with bound_to_parent(), open_shared_state() if options is not None else nullcontext() as board:
            self._llm = AsyncLLM.from_vllm_config(
                config,
                usage_context=CONTEXT,
                stat_loggers=[self.stats.logger_class()],
                disable_log_stats=bool(arguments.get("disable_log_stats", True)),
            )
        self.tokenizer = self._llm.get_tokenizer()
        self._defaults = config.model_config.get_diff_sampling_param()
        self._config = config
        self.geometry = _geometry(config)
        self.step_cost = step_cost_prior(config, self.geometry)
        self._has_priorities = config.scheduler_config.policy == "priority"
        self.max_model_tokens: int = config.model_config.max_model_len
        self.max_running: int = max_running_requests(config.scheduler_config)
        # Each engine's first block is a placeholder that never holds a token.
        blocks = config.cache_config.num_gpu_blocks - config.parallel_config.data_parallel_size
        self.kv_bytes: int = blocks * self.geometry.bytes_per_block
        self.stats.cells = blocks * self.geometry.block_tokens
        if options is not None and board is not None:
            size = self.geometry.bytes_per_block
            self.scheduler_client = SchedulerClient(self._llm, board, options, total=blocks, block_bytes=size)
            self.stats.waited = self.scheduler_client.waited
        try:
            self._output_parser = OutputParser(
                tool_parser, reasoning_parser, self.tokenizer, config.model_config
            )
        except Exception:
            self._llm.shutdown()
            raise

    def start_watchdog(self, processes: Sequence[BaseProcess], *, stall_seconds: float) -> None:
        """From now on the engine, which runs in these, may not be silent for longer while it has requests."""
        longest = longest_step(
            self.step_cost,
            prompt_tokens=self._config.scheduler_config.max_num_batched_tokens,
            sequences=self.max_running,
            cells=self.stats.cells,
        )
        self._step_watchdog = StepWatchdog(
            processes,
            stall_seconds=stall_seconds,
            longest_seconds=_STALL_FACTOR * longest,
            is_idle=lambda: self._is_idle,
            on_killed=self._on_stall,
        )
        self.stats.on_report = self._step_watchdog.step_finished

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: Sampling,
        chat: ChatPrompt | None,
        *,
        rank: int = 0,
        done: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Delta]:
        """`metadata` is what Tandem's scheduler is told of the request; vLLM's own goes by the rank. The last
        `done` tokens of the prompt are the answer's so far."""
        with self._translated_errors(), self._tracked(request_id):
            structure = structured_outputs(sampling.structure)
            conversation = self._output_parser.begin(chat, structure, prompt, done=done)
            params = sampling_params(
                sampling,
                self._defaults,
                structure=structure if conversation is None else conversation.structured_outputs,
                skip_special_tokens=sampling.skip_special_tokens
                and (conversation is None or conversation.skip_special_tokens),
                extra=None if metadata is None else {KEY: dict(metadata)},
            )
            priority = rank if self._has_priorities else 0
            waiting = (
                self._output_parser.unparsed_options if conversation is None else conversation.grammar_options
            )
            outputs = self._llm.generate(
                tokens_input(list(prompt)), params, request_id, priority=priority, **waiting
            )
            # Closing vLLM's generator is what aborts the request in the engine.
            async with aclosing(outputs):
                async for output in outputs:
                    if conversation is None and len(output.outputs) == 1:
                        yield to_delta(output, output.outputs[0], sampling.logprobs)
                        continue
                    # From here on a ValueError is a fault of ours or of a parser, not of the caller.
                    with self._translated_errors(client_errors=()):
                        for step in _deltas(output, sampling, conversation):
                            yield step

    def _on_stall(self) -> None:
        self.is_stalled = True
        log.critical(_ENGINE_STALLED)
        # At once: nobody knows how long a process that hangs takes to die.
        self.fail_pending()

    @property
    def _is_idle(self) -> bool:
        return not self._llm.output_processor.has_unfinished_requests()

    @contextmanager
    def _tracked(self, request_id: str) -> Iterator[None]:
        if self.scheduler_client is None:
            yield
            return
        self.scheduler_client.track(request_id)
        try:
            yield
        finally:
            self.scheduler_client.untrack(request_id)

    async def send_to_scheduler(self, call: Callable[[SchedulerClient], Awaitable[None]]) -> None:
        """Raises Refused, also for an engine with vLLM's own scheduler."""
        if self.scheduler_client is None:
            raise Refused("the engine runs vLLM's own scheduler; set scheduling.engine and restart")
        with self._translated_errors():
            await call(self.scheduler_client)

    async def preempt(self, request_id: str) -> None:
        """What is sent to the engine after this finds the blocks free: it takes messages in order."""
        with self._translated_errors():
            await self._llm.abort(request_id)

    async def ping(self) -> None:
        """A round trip through the engine's own loop. Raises BackendDown when it is dead."""
        with self._translated_errors():
            await self._llm.check_health()
            await while_alive(self._llm, self._llm.is_sleeping())

    @contextmanager
    def _translated_errors(
        self, client_errors: tuple[type[Exception], ...] = CLIENT_ERRORS
    ) -> Iterator[None]:
        try:
            yield
        except (Refused, BackendDown, BackendFailed):
            raise
        except EngineDeadError as error:
            raise BackendDown(self._down_message) from error
        except client_errors as error:
            raise _to_refused(error) from error
        except Exception as error:
            # vLLM wraps what it did not foresee, a caller's mistake at times included.
            cause = error.__cause__ if isinstance(error, EngineGenerateError) else None
            if isinstance(cause, client_errors):
                raise _to_refused(cause) from error
            first = cause or error
            raise BackendFailed(f"vLLM failed this request: {type(first).__name__}: {first}") from error

    @property
    def _down_message(self) -> str:
        return _ENGINE_STALLED if self.is_stalled else _ENGINE_DIED

    def state(self) -> EngineState:
        """Raises BackendDown when it is dead: its last report would look alive."""
        if self._llm.errored:
            raise BackendDown(self._down_message)
        # A step that only aborts reports nothing: without requests the last report is out of date.
        is_idle = self._is_idle
        if self.scheduler_client is not None:
            return self.scheduler_client.state(is_idle=is_idle)
        last = self.stats
        if is_idle:
            return EngineState(0, self.kv_bytes, 0, 0, last.preemptions)
        used = round(last.kv_usage * self.kv_bytes)
        return EngineState(used, self.kv_bytes, last.running, last.waiting, last.preemptions)

    def fail_pending(self) -> None:
        """Ends every open stream: vLLM's shutdown alone would leave them waiting for ever."""
        if self._step_watchdog is not None:
            self._step_watchdog.end()
        # Its reader would otherwise report the end of the engine as a crash.
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        self._llm.output_processor.propagate_error(EngineDeadError())

    def shutdown(self) -> None:
        """Blocks until the engine's processes are gone. Nothing may be asked of this object afterwards."""
        self._llm.shutdown()
        # Its finaliser must run now: at the interpreter's exit it fails and says so.
        self.scheduler_client = None
        del self._llm


def _geometry(config: Any) -> KvGeometry:
    model, cache = config.model_config, config.cache_config
    # vLLM has settled on a dtype where ours would have to guess from the checkpoint.
    dtype = str(model.dtype).removeprefix("torch.") if cache.cache_dtype == "auto" else cache.cache_dtype
    return kv_geometry(
        model.hf_config.to_dict(),
        block_tokens=cache.block_size,
        cache_dtype=dtype,
        tensor_parallel=config.parallel_config.tensor_parallel_size,
    )


def _deltas(
    output: RequestOutput, sampling: Sampling, conversation: ParsedConversation | None
) -> Iterator[Delta]:
    for completion in output.outputs:
        step = to_delta(output, completion, sampling.logprobs)
        yield step if conversation is None else conversation.read(step)


def _to_refused(error: Exception) -> Refused:
    message = str(error.args[0]) if error.args else str(error)
    # Without the time and the line of a C++ source before xgrammar's own words.
    return Refused(_CPP_LOG_PREFIX.sub("", message).strip(), param=getattr(error, "parameter", None))
