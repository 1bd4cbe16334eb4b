"""Implements the `Generator` port with vLLM's AsyncLLM in the server process.

EngineCore always runs in a child process. Nothing here imports vLLM before `start`, so that checking a
configuration and running tests without engines stay fast.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, TypeVar

from backends import bundled_models
from backends.garbage_collection import paused_collection
from backends.supervision import kill_tree
from backends.vllm import chat_template
from backends.vllm.grammar_checker import GrammarChecker
from backends.vllm.grammar_limits import GrammarLimits
from backends.vllm.hybrid.support import HybridSetup
from backends.vllm.plugin.request_metadata import metadata_of
from backends.vllm.text_codec import HuggingFaceCodec
from backends.vllm.warm_up import WARM_UP_LIMIT_SECONDS, learn_step_times, warm_up
from controlplane.core.engine_reports import EngineState, EngineStep, StepCost
from controlplane.core.errors import BackendDown
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import FIRST_HANDOFF, ChatPrompt, Delta, Handoff, Sampling, SamplingDefaults
from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.ports import InTurn
from controlplane.core.request import Request
from controlplane.core.start_stages import StartStage, enter_stage
from controlplane.core.text_limits import LONG_TEXT_CHARACTERS, TextLimit, total_length
from controlplane.policy.engine.options import EngineOptions

if TYPE_CHECKING:
    from backends.vllm.engine import VllmEngine
    from backends.vllm.prompt_images import ChatImages

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# A step over a long prompt may take seconds.
_CHECK_TIMEOUT_SECONDS = 15.0

# Special tokens make the longest token of a small vocabulary no measure of what a token may cover.
_LEAST_TOKEN_CHARACTERS = 16

_POLL_SECONDS = 0.1
_TERMINATION_SECONDS = 5.0
_ENGINE_PROCESS_PREFIX = "EngineCore"


class VllmGenerator:
    """A `Generator` backed by one vLLM engine.

    `geometry`, `kv_bytes`, the limits, the defaults and `step_cost` are set once `start` has returned.

    Args:
        model: local folder, Hugging Face name or bundled `tandem/…` model.
        served_name: name in requests and metrics; `model` by default.
        engine_arguments: passed to vLLM's AsyncEngineArgs unchanged.
        lora_modules: folders of LoRA adapters by name.
        tool_parser: name of a vLLM tool-call parser.
        tool_strictness: vLLM's strictness level for calls that the model chooses.
        reasoning_parser: name of a vLLM reasoning parser.
        scheduling: runs Tandem's scheduler in EngineCore with these options; None keeps vLLM's own.
        hybrid: hidden-state cache; needs `scheduling`.
        grammars: bounds the grammars of structured outputs; None leaves them to vLLM.
        stall_seconds: an engine that has requests but takes no step for this long, or for ten times the
            predicted longest step if that is more, is killed.
    """

    geometry: KvGeometry
    kv_bytes: int
    max_model_tokens: int
    max_token_characters: int
    max_running: int
    max_prompt_logprobs: int
    sampling_defaults: SamplingDefaults
    step_cost: StepCost | None

    def __init__(
        self,
        model: str,
        *,
        served_name: str | None = None,
        engine_arguments: Mapping[str, Any] | None = None,
        lora_modules: Mapping[str, str] | None = None,
        tool_parser: str | None = None,
        tool_strictness: str = "auto",
        reasoning_parser: str | None = None,
        scheduling: EngineOptions | None = None,
        hybrid: HybridSetup | None = None,
        grammars: GrammarLimits | None = None,
        stall_seconds: float = 300.0,
    ) -> None:
        self.has_tandem_scheduler = scheduling is not None
        self.has_prefix_cache = False
        self.on_step: Callable[[EngineStep], None] | None = None
        self.on_down: Callable[[str], None] | None = None
        self.model = served_name or model
        self._source = model
        self._arguments = dict(engine_arguments or {})
        self._lora_modules = dict(lora_modules or {})
        self._parsers: dict[str, Any] = {
            "tool_parser": tool_parser,
            "reasoning_parser": reasoning_parser,
            "tool_strictness": tool_strictness,
        }
        self._scheduling = scheduling
        self._hybrid = hybrid
        self._grammars = None if grammars is None else GrammarChecker(grammars)
        self._stall_seconds = stall_seconds
        self._engine: VllmEngine | None = None
        self._construction: asyncio.Future[VllmEngine] | None = None
        self._other_engine_pids: set[int | None] = set()
        self._is_start_cancelled = False
        self._tokenizer: Any = None
        self.images: ChatImages | None = None
        self.stall_count = 0

    async def start(self) -> None:
        """Starts the engine and warms it up; after `stop` it may be started again.

        Raises ValueError for engine arguments or adapters that vLLM refuses, BackendDown if the engine does
        not start.
        """
        if self._engine is not None or self._construction is not None:
            raise RuntimeError(f"engine of {self.model} was started before; stop it first")
        try:
            if self._grammars is not None:
                self._grammars.start()
            await self._start_engine()
            if self._grammars is not None and self._engine is not None:
                await self._grammars.engine_started(self._engine.config)
        except BaseException:
            await self.stop()
            raise

    async def _start_engine(self) -> None:
        self._other_engine_pids = {process.pid for process in _engine_processes()}
        self._is_start_cancelled = False
        try:
            engine_class = await _in_daemon_thread(_load_engine)
            self._construction = asyncio.ensure_future(asyncio.to_thread(self._construct, engine_class))
            # Shielded: a thread cannot be cancelled, and the engine that it creates must be shut down.
            engine = await asyncio.shield(self._construction)
        except asyncio.CancelledError:
            if self._construction is not None:
                await self._abort_construction()
            raise
        except ValueError:
            raise
        except Exception as error:
            raise BackendDown(f"vLLM did not start for {self.model}: {error}; its log says why") from error
        finally:
            self._construction = None
        self._engine, self._tokenizer = engine, engine.tokenizer
        self.geometry, self.kv_bytes = engine.geometry, engine.kv_bytes
        self.max_model_tokens, self.max_running = engine.max_model_tokens, engine.max_running
        # In a thread: a vocabulary has 100,000 tokens and more.
        self.max_token_characters = await asyncio.to_thread(_longest_token, engine.tokenizer)
        self.step_cost, self.has_prefix_cache = engine.step_cost, engine.has_prefix_cache
        self.sampling_defaults = engine.sampling_defaults
        self.images = engine.images_of and engine.images_of(self._text_limit)
        engine.supervise(self._engine_children(), self._died)
        # A step of the warm-up may compile for longer than any later one.
        engine.start_watchdog(stall_seconds=max(self._stall_seconds, WARM_UP_LIMIT_SECONDS))
        await engine.load_adapters(self._lora_modules)
        self.max_prompt_logprobs = await engine.bound_prompt_logits()
        enter_stage(StartStage.WARMING_UP)
        await warm_up(engine, self.model)
        if engine.scheduler_client is not None:
            # Replaces what the scheduler has learned from steps that compiled.
            await engine.scheduler_client.connect(engine.step_cost)
            await learn_step_times(engine)
        engine.start_watchdog(stall_seconds=self._stall_seconds)
        engine.watch_outputs()
        # Set last, since the steps of the warm-up say nothing about later ones.
        engine.stats.on_step = self._report_step
        engine.grammars = self._grammars

    async def stop(self) -> None:
        """Shuts the engine down, also while `start` runs; open streams end with BackendDown. Idempotent."""
        if self._construction is not None:
            await self._abort_construction()
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                engine.fail_pending()
                await asyncio.to_thread(engine.shutdown)
        finally:
            if self._grammars is not None:
                await self._grammars.stop()

    async def check(self) -> None:
        """Makes a round trip through EngineCore's loop. Raises BackendDown if it fails or exceeds 15 s."""
        try:
            await asyncio.wait_for(self._require_engine().ping(), _CHECK_TIMEOUT_SECONDS)
        except TimeoutError as error:
            raise BackendDown(
                f"the engine of {self.model} did not answer within {_CHECK_TIMEOUT_SECONDS:.0f} s"
            ) from error

    @property
    def codec(self) -> HuggingFaceCodec:
        """The tokenizer of the latest engine. Raises BackendDown before the first start."""
        return HuggingFaceCodec(self._require_tokenizer())

    async def render_chat(self, prompt: ChatPrompt) -> list[int]:
        """Token ids of the conversation under the model's chat template. Raises Refused."""
        template = None if self.images is None else self.images.template
        render = partial(chat_template.render, self._require_tokenizer(), prompt, self._text_limit, template)
        return await asyncio.to_thread(render) if total_length(prompt) > LONG_TEXT_CHARACTERS else render()

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a plain text, with the special tokens that the tokenizer adds. Raises Refused."""
        encode = partial(self._text_limit.encode, self._require_tokenizer().encode, param="prompt")
        if len(text) > LONG_TEXT_CHARACTERS:
            return list(await asyncio.to_thread(encode, text))
        return list(encode(text))

    async def check_grammar(
        self, sampling: Sampling, chat: ChatPrompt | None, *, tenant: str, in_turn: InTurn
    ) -> None:
        """Checks the grammar of a request, if it has one. Raises Refused, BackendDown, BackendFailed."""
        if sampling.structure is not None or (chat is not None and chat.tools):
            engine = self._require_engine()
            await engine.check_grammar(sampling, chat, tenant=tenant, in_turn=in_turn)

    @property
    def _text_limit(self) -> TextLimit:
        return TextLimit(self.model, self.max_model_tokens, self.max_token_characters)

    def generate(
        self,
        request: Request,
        prompt: Sequence[int],
        sampling: Sampling,
        chat: ChatPrompt | None = None,
        *,
        handoff: Handoff = FIRST_HANDOFF,
    ) -> AsyncGenerator[Delta]:
        """Streams the deltas of one request; closing the generator aborts it in the engine."""
        metadata = metadata_of(request, handoff) if self.has_tandem_scheduler else None
        engine = self._require_engine()
        return engine.generate(
            request.id,
            prompt,
            sampling,
            chat,
            adapter=request.adapter,
            rank=handoff.rank,
            resumed_tokens=handoff.resumed_tokens,
            metadata=metadata,
        )

    async def preempt(self, request_id: str) -> None:
        """Aborts the request in the engine; its stream ends with the finish reason "preempted"."""
        await self._require_engine().preempt(request_id)

    async def set_quota(self, quota_bytes: int, *, use_ceiling_bytes: int | None = None) -> None:
        """Sets the KV-cache quota and use ceiling of Tandem's scheduler. Raises Refused."""
        await self._require_engine().send_to_scheduler(
            lambda client: client.set_quota(quota_bytes, use_ceiling_bytes=use_ceiling_bytes)
        )

    async def set_options(self, changes: Mapping[str, Any]) -> None:
        """Changes options of Tandem's scheduler, by the names of `scheduling.engine`. Raises Refused."""
        await self._require_engine().send_to_scheduler(lambda client: client.set_options(changes))

    def set_forecast(self, request_id: str, forecast: LengthForecast) -> None:
        """Sends a new length forecast to Tandem's scheduler, in the background."""
        if self._engine is not None and self._engine.scheduler_client is not None:
            self._engine.scheduler_client.set_forecast(request_id, forecast)

    def set_device_contention(self, *, is_shared: bool) -> None:
        """Signals to Tandem's scheduler whether an embedding pass is under way on the device."""
        if self._engine is not None and self._engine.scheduler_client is not None:
            self._engine.scheduler_client.set_device_contention(is_shared=is_shared)

    def state(self) -> EngineState:
        """Memory and queue lengths as of the engine's latest step. Raises BackendDown."""
        return self._require_engine().state()

    def _report_step(self, step: EngineStep) -> None:
        if self.on_step is not None:
            self.on_step(step)

    def _died(self, reason: str) -> None:
        self.stall_count += self._engine is not None and self._engine.is_stalled
        if self.on_down is not None:
            self.on_down(reason)

    def _require_tokenizer(self) -> Any:
        """The tokenizer of the latest engine, which may be dead."""
        if self._tokenizer is None:
            raise BackendDown(f"the engine of {self.model} was not started")
        return self._tokenizer

    def _require_engine(self) -> "VllmEngine":
        if self._engine is None:
            raise BackendDown(f"the engine of {self.model} is not running")
        return self._engine

    def _construct(self, engine_class: "type[VllmEngine]") -> "VllmEngine":
        if self._is_start_cancelled:
            raise BackendDown(f"the start of {self.model} was cancelled")
        model = bundled_models.resolve(self._source)
        # Ctrl-C sends SIGINT to the whole foreground process group, and the end of a terminal SIGHUP; vLLM's
        # process would drop its requests. A child inherits the signal mask of the thread that starts it. The
        # resource tracker ignores SIGINT itself, and starting it unblocks SIGINT in the thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return engine_class(
            model, self.model, self._arguments, self._scheduling, self._hybrid, **self._parsers
        )

    async def _abort_construction(self) -> None:
        """Terminates the processes of an engine under construction, so that its constructor fails at once.

        Polls, because nothing signals when the constructor starts a process and loading takes minutes. A
        process that does not end by itself, such as a stopped one, is killed.
        """
        construction, self._is_start_cancelled = self._construction, True
        assert construction is not None
        terminated: dict[int | None, float] = {}
        loop = asyncio.get_running_loop()
        while not construction.done():
            for process in self._engine_children():
                if process.pid not in terminated:
                    terminated[process.pid] = loop.time()
                    process.terminate()
                elif loop.time() - terminated[process.pid] > _TERMINATION_SECONDS:
                    kill_tree(process)
            await asyncio.wait([construction], timeout=_POLL_SECONDS)
        with suppress(Exception):
            engine = await asyncio.shield(construction)
            await asyncio.to_thread(engine.shutdown)

    def _engine_children(self) -> list[BaseProcess]:
        """The processes of this engine."""
        return [process for process in _engine_processes() if process.pid not in self._other_engine_pids]


def _longest_token(tokenizer: Any) -> int:
    """Bound of the characters that one token covers: byte-level tokens have at least one byte for each."""
    return max(_LEAST_TOKEN_CHARACTERS, *map(len, tokenizer.get_vocab()))


def _load_engine() -> "type[VllmEngine]":
    """Imports vLLM, which takes seconds."""
    # Usage statistics are sent only if the operator enables them.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # On a GPU vLLM would fork a process with many threads, whose locks and sockets the engine would share.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # Outputs that vLLM converts before anything else runs. With 20 alternatives of each token 16 take 50 ms.
    os.environ.setdefault("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "16")
    with paused_collection():
        from backends.vllm import output_turns, prompt_logprobs, returned_logprobs, token_texts
        from backends.vllm.engine import VllmEngine
    output_turns.take_turns()
    token_texts.remember_token_texts()
    prompt_logprobs.defer_prompt_logprobs()
    returned_logprobs.forget_returned_logprobs()
    return VllmEngine


async def _in_daemon_thread(work: Callable[[], Result]) -> Result:
    """Runs `work` in a daemon thread, which neither a cancelled caller nor the end of the process waits for.

    Only for work that leaves nothing to clean up.
    """
    result: Future[Result] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(result)


def _engine_processes() -> list[BaseProcess]:
    children: list[BaseProcess] = list(multiprocessing.active_children())
    return [child for child in children if child.name.startswith(_ENGINE_PROCESS_PREFIX)]
