"""Wraps vLLM's AsyncLLM: runs requests, reports state and translates errors into those of the port.

Importing this module imports vLLM, which takes seconds; constructing `VllmEngine` blocks for half a minute
or more. Do both off the event loop.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from backends.vllm.argument_names import with_tandem_scheduler
from backends.vllm.arguments import CONTEXT, engine_config
from backends.vllm.compat import (
    CLIENT_ERRORS,
    EngineDeadError,
    EngineGenerateError,
    check_release,
    client_message,
    max_running_requests,
)
from backends.vllm.grammar_checker import CheckedGrammar, GrammarChecker
from backends.vllm.hybrid.support import HybridSetup
from backends.vllm.lora_adapters import load_adapters
from backends.vllm.output_parsing import OutputParser, ParsedConversation, check_parsers
from backends.vllm.plugin.request_metadata import KEY
from backends.vllm.plugin.shared_state import open_shared_state
from backends.vllm.process import bound_to_parent, sockets_in_run_directory, while_alive
from backends.vllm.prompt_images import chat_images, engine_input
from backends.vllm.prompt_logits import bound_prompt_logits
from backends.vllm.prompt_logprobs import convert_prompt_logprobs
from backends.vllm.sampling import defaults_of, sampling_params, structured_outputs, to_delta, with_validated
from backends.vllm.scheduler_client import SchedulerClient
from backends.vllm.stats import EngineStats
from backends.vllm.step_cost_prior import geometry_of, step_cost_prior
from backends.vllm.step_watchdog import StepWatchdog, longest_step
from controlplane.core.engine_reports import EngineState
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.core.generation import ChatPrompt, Delta, Sampling
from controlplane.core.ports import InTurn
from controlplane.policy.engine.options import EngineOptions

log = logging.getLogger(__name__)

_ENGINE_DIED = "the vLLM engine died; its log says why"
_ENGINE_STALLED = "the vLLM engine had requests but took no step for too long and was killed"
# A step that takes this many times the predicted longest step counts as stalled.
_STALL_FACTOR = 10


class VllmEngine:
    """One running vLLM engine: AsyncLLM, its parsers, statistics, step watchdog and scheduler client.

    The constructor raises ValueError for engine arguments that vLLM refuses, RuntimeError if the engine
    does not start.
    """

    scheduler_client: SchedulerClient | None = None
    """None if vLLM's own scheduler runs."""
    is_stalled = False
    """Whether the step watchdog killed the engine."""
    _step_watchdog: StepWatchdog | None = None
    _has_ended = False
    _processes: Sequence[BaseProcess] = ()
    _on_down: Callable[[str], None]
    _adapters: Mapping[str, LoRARequest] = MappingProxyType({})
    grammars: GrammarChecker | None = None
    """Knows the grammars that were validated; without it vLLM validates them."""

    def __init__(
        self,
        model: str,
        served_name: str,
        arguments: Mapping[str, Any],
        options: EngineOptions | None,
        hybrid: HybridSetup | None,
        *,
        tool_parser: str | None,
        reasoning_parser: str | None,
        tool_strictness: str,
    ) -> None:
        check_release()
        check_parsers(tool_parser, reasoning_parser)
        if options is not None:
            arguments = with_tandem_scheduler(arguments, options)
        if hybrid is not None:
            arguments = hybrid.arguments(arguments)
            # Imported only here: this loads vLLM's own model classes.
            from backends.vllm.hybrid import models

            models.register()
        config = engine_config(model, served_name, arguments, reasoning_parser=reasoning_parser)
        self.stats = EngineStats()
        state_file = open_shared_state() if options is not None else nullcontext()
        with bound_to_parent(), sockets_in_run_directory(), state_file as shared_state:
            self._llm = AsyncLLM.from_vllm_config(
                config,
                usage_context=CONTEXT,
                stat_loggers=[self.stats.logger_class()],
                disable_log_stats=bool(arguments.get("disable_log_stats", True)),
            )
        try:
            self.tokenizer = self._llm.get_tokenizer()
            self._defaults, self.sampling_defaults = defaults_of(config.model_config)
            self.config = config
            self.images_of = chat_images(self._llm.renderer, config.model_config)
            self.geometry = geometry_of(config)
            self.step_cost = step_cost_prior(config, self.geometry)
            self._has_priorities = config.scheduler_config.policy == "priority"
            self.has_prefix_cache: bool = config.cache_config.enable_prefix_caching
            self.max_model_tokens: int = config.model_config.max_model_len
            self.max_running: int = max_running_requests(config.scheduler_config)
            # vLLM reserves the first block of each engine as a placeholder (null block).
            blocks = config.cache_config.num_gpu_blocks - config.parallel_config.data_parallel_size
            self.kv_bytes: int = blocks * self.geometry.bytes_per_block
            self.stats.cells = blocks * self.geometry.block_tokens
            if options is not None and shared_state is not None:
                size = self.geometry.bytes_per_block
                self.scheduler_client = SchedulerClient(
                    self._llm, shared_state, options, total=blocks, block_bytes=size
                )
                self.stats.waited = self.scheduler_client.waited
            self._output_parser = OutputParser(
                tool_parser, reasoning_parser, self.tokenizer, config.model_config, tool_strictness
            )
        except Exception:
            self.shutdown()
            raise

    def supervise(self, processes: Sequence[BaseProcess], on_down: Callable[[str], None]) -> None:
        """Calls `on_down` with the reason as soon as one of the engine's `processes` ends or is killed."""
        self._on_down, self._processes = on_down, processes
        for process in processes:
            asyncio.get_running_loop().add_reader(process.sentinel, self._engine_ended)

    def start_watchdog(self, *, stall_seconds: float) -> None:
        """Kills the engine if it has requests but reports no step for `stall_seconds`, from now on."""
        if self._step_watchdog is not None:
            self._step_watchdog.stop()
        longest = longest_step(
            self.step_cost,
            prompt_tokens=self.config.scheduler_config.max_num_batched_tokens,
            sequences=self.max_running,
            cells=self.stats.cells,
        )
        self._step_watchdog = StepWatchdog(
            self._processes,
            stall_seconds=stall_seconds,
            longest_seconds=_STALL_FACTOR * longest,
            is_idle=lambda: self._is_idle,
            on_killed=self._on_stall,
        )
        self.stats.on_report = self._step_watchdog.step_finished

    def watch_outputs(self) -> None:
        """Reports the engine as dead if the task that reads its outputs fails; call it after a request."""
        if self._llm.output_handler is not None:
            self._llm.output_handler.add_done_callback(self._output_handler_ended)

    def _output_handler_ended(self, handler: "asyncio.Task[None]") -> None:
        if not handler.cancelled():
            self._engine_ended()

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: Sampling,
        chat: ChatPrompt | None,
        *,
        adapter: str | None = None,
        rank: int = 0,
        resumed_tokens: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Delta]:
        """Streams the deltas of one request; closing the generator aborts it in the engine.

        Args:
            request_id: unique among the requests in the engine.
            prompt: token ids.
            sampling: sampling parameters.
            chat: the conversation, if there is one; its reasoning, calls and images are handled.
            adapter: name of a LoRA adapter.
            rank: priority for vLLM's own scheduler; the smallest runs first.
            resumed_tokens: number of tokens at the prompt's end that were generated before a preemption.
            metadata: class, SLO and forecast for Tandem's scheduler.

        Raises Refused, BackendDown, BackendFailed.
        """
        with self._translated_errors(), self._tracked(request_id):
            structure = structured_outputs(sampling.structure)
            conversation = await self._output_parser.async_begin(
                chat, structure, prompt, resumed_tokens=resumed_tokens
            )
            if self._has_ended:  # `fail_pending` has ended the streams that vLLM knew then.
                raise EngineDeadError
            structure = structure if conversation is None else conversation.structured_outputs
            checked = None if structure is None or self.grammars is None else self.grammars.find(structure)
            params = self._params(sampling, structure, conversation, metadata, checked)
            parser = self._output_parser if conversation is None else conversation
            outputs = self._llm.generate(
                engine_input(prompt, chat),
                params,
                request_id,
                lora_request=None if adapter is None else self._adapters[adapter],
                priority=rank if self._has_priorities else 0,
                **parser.grammar_options,
            )
            async with aclosing(outputs):
                async for output in outputs:
                    if checked is not None and self.grammars is not None:
                        self.grammars.engine_compiled(checked)
                        checked = None
                    # A ValueError here is a defect of a parser or this backend, not of the request.
                    with self._translated_errors(client_errors=()):
                        if output.prompt_logprobs:
                            await convert_prompt_logprobs(output)
                        if conversation is None and len(output.outputs) == 1:
                            yield to_delta(output, output.outputs[0], sampling.logprobs)
                            continue
                        for delta in _deltas(output, sampling, conversation):
                            yield delta

    def _params(
        self,
        sampling: Sampling,
        structure: StructuredOutputsParams | None,
        conversation: ParsedConversation | None,
        metadata: Mapping[str, Any] | None,
        checked: CheckedGrammar | None,
    ) -> SamplingParams:
        hides_special_tokens = conversation is None or conversation.skip_special_tokens
        params = sampling_params(
            sampling,
            self._defaults,
            structure=structure,
            skip_special_tokens=sampling.skip_special_tokens and hides_special_tokens,
            vocabulary=self.config.model_config.get_vocab_size(),
            extra=None if metadata is None else {KEY: dict(metadata)},
        )
        return params if checked is None else with_validated(params, checked.validated)

    async def load_adapters(self, folders: Mapping[str, str]) -> None:
        """Loads LoRA adapters. Raises ValueError for one that vLLM does not load, BackendDown."""
        self._adapters = await load_adapters(self._llm, folders, self._call)

    async def bound_prompt_logits(self) -> int:
        """Bounds the logits of prompts; the most prompt tokens with log probabilities, or 0."""
        with self._translated_errors(), self._call():
            return await while_alive(self._llm, bound_prompt_logits(self._llm))

    async def check_grammar(
        self, sampling: Sampling, chat: ChatPrompt | None, *, tenant: str, in_turn: InTurn
    ) -> None:
        """Raises Refused for a grammar that costs the engine too much; see `GrammarChecker.check`.

        What `in_turn` raises is the caller's, such as a rejection by a rate limit, and is passed on.
        """
        if self.grammars is None:
            return
        with self._translated_errors():
            stated = await self._output_parser.async_constraint(chat, structured_outputs(sampling.structure))
        if stated is not None:
            is_of_tools = sampling.structure is None or stated.structural_tag is not None
            await self.grammars.check(stated, is_of_tools=is_of_tools, tenant=tenant, in_turn=in_turn)

    def _on_stall(self) -> None:
        self.is_stalled = True
        log.critical(_ENGINE_STALLED)
        # A killed process may take arbitrarily long to exit, so streams end without waiting for it.
        self._engine_ended()

    def _engine_ended(self) -> None:
        """Fails the open streams and reports the death, once; does nothing after `fail_pending`."""
        if not self._has_ended:
            self.fail_pending()
            self._on_down(self._down_message)

    @property
    def _is_idle(self) -> bool:
        return not self._llm.output_processor.has_unfinished_requests()

    @contextmanager
    def _tracked(self, request_id: str) -> Iterator[None]:
        # `shutdown` clears the attribute while streams are still open.
        if (client := self.scheduler_client) is None:
            yield
            return
        client.track(request_id)
        try:
            yield
        finally:
            client.untrack(request_id)

    async def send_to_scheduler(self, call: Callable[[SchedulerClient], Awaitable[None]]) -> None:
        """Runs one command on Tandem's scheduler. Raises Refused, also if vLLM's own scheduler runs."""
        if self.scheduler_client is None:
            raise Refused("the engine runs vLLM's own scheduler; set scheduling.engine and restart")
        with self._translated_errors():
            await call(self.scheduler_client)

    async def preempt(self, request_id: str) -> None:
        """Aborts the request; messages sent to the engine after this find its blocks free."""
        with self._translated_errors():
            await self._llm.abort(request_id)

    async def ping(self) -> None:
        """Makes a round trip through EngineCore's loop. Raises BackendDown if the engine is dead.

        A pending ping counts as work for the step watchdog, so a hang of an idle engine is found too.
        """
        with self._translated_errors(), self._call():
            await self._llm.check_health()
            await while_alive(self._llm, self._llm.is_sleeping())

    def _call(self) -> AbstractContextManager[None]:
        """A context within which the engine counts as busy."""
        return nullcontext() if self._step_watchdog is None else self._step_watchdog.call()

    @contextmanager
    def _translated_errors(
        self, client_errors: tuple[type[Exception], ...] = CLIENT_ERRORS
    ) -> Iterator[None]:
        try:
            yield
        except (Refused, BackendDown, BackendFailed):
            raise
        except EngineDeadError as error:
            # vLLM ends the streams of a crashed engine before its process ends.
            self._engine_ended()
            raise BackendDown(self._down_message) from error
        except client_errors as error:
            raise _to_refused(error) from error
        except Exception as error:
            # vLLM also wraps some errors that the request caused.
            cause = error.__cause__ if isinstance(error, EngineGenerateError) else None
            if isinstance(cause, client_errors):
                raise _to_refused(cause) from error
            first = cause or error
            raise BackendFailed(f"vLLM failed this request: {type(first).__name__}: {first}") from error

    @property
    def _down_message(self) -> str:
        return _ENGINE_STALLED if self.is_stalled else _ENGINE_DIED

    def state(self) -> EngineState:
        """Memory and queue lengths as of the latest step. Raises BackendDown if the engine is dead."""
        if self._llm.errored:
            raise BackendDown(self._down_message)
        # A step that only aborts reports no statistics, so without requests the latest report is stale.
        is_idle = self._is_idle
        if self.scheduler_client is not None:
            return self.scheduler_client.state(is_idle=is_idle)
        last = self.stats
        if is_idle:
            return EngineState(0, self.kv_bytes, 0, 0, last.preemptions)
        used = round(last.kv_usage * self.kv_bytes)
        return EngineState(used, self.kv_bytes, last.running, last.waiting, last.preemptions)

    def fail_pending(self) -> None:
        """Ends every open stream with EngineDeadError; vLLM's shutdown alone would leave them waiting."""
        self._has_ended = True
        for process in self._processes:
            asyncio.get_running_loop().remove_reader(process.sentinel)
        if self._step_watchdog is not None:
            self._step_watchdog.stop()
        # The output handler would report the end of the engine as a crash.
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        self._llm.output_processor.propagate_error(EngineDeadError())

    def shutdown(self) -> None:
        """Blocks until the engine's processes have exited; the object is unusable afterwards."""
        self._llm.shutdown()
        # AsyncLLM's finaliser must run now, since it prints an error at interpreter exit.
        self.scheduler_client = self.stats.waited = None
        del self._llm


def _deltas(
    output: RequestOutput, sampling: Sampling, conversation: ParsedConversation | None
) -> Iterator[Delta]:
    for completion in output.outputs:
        delta = to_delta(output, completion, sampling.logprobs)
        yield delta if conversation is None else conversation.read(delta)


def _to_refused(error: Exception) -> Refused:
    return Refused(client_message(error), param=getattr(error, "parameter", None))
