"""Is the LLM engine there, and what may be asked of it? vLLM's AsyncLLM inside the server process.

The engine itself is always a child process. Nothing here imports vLLM before `start`, so a
configuration is checked, and a test without engines runs, in no time.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, TypeVar

from backends import bundled_models
from backends.vllm import chat_template
from backends.vllm.hybrid.support import HybridSetup
from backends.vllm.plugin.request_metadata import metadata_of
from controlplane.core.errors import BackendDown
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import FIRST_HANDOFF, ChatPrompt, Delta, Handoff, Sampling
from controlplane.core.geometry import KvGeometry
from controlplane.core.ports import EngineState, EngineStep, StepCost
from controlplane.core.request import Request
from controlplane.policy.engine.options import EngineOptions

if TYPE_CHECKING:
    from backends.vllm.engine import VllmEngine

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# A step over a long prompt may take seconds; an engine silent for longer is not serving.
_CHECK_TIMEOUT_SECONDS = 15.0

# Above this a template and its tokens take longer than the loop may stand still (about 1 ms).
_LONG_TEXT_CHARACTERS = 4_000

_POLL_SECONDS = 0.1
_ENGINE_PROCESS_PREFIX = "EngineCore"


class VllmGenerator:
    """The `Generator` port over vLLM.

    `model` is a local folder, a Hugging Face name or a bundled `tandem/…` one; `engine_arguments` go to
    vLLM's AsyncEngineArgs as they are. With `scheduling` Tandem's scheduler orders its steps. Geometry
    and limits are known once `start` has returned. `hybrid` needs `scheduling`. An engine that has requests
    and takes no step for `stall_seconds`, or for ten times what its longest should take, is killed.
    """

    geometry: KvGeometry
    kv_bytes: int
    max_model_tokens: int
    max_running: int
    step_cost: StepCost | None

    def __init__(
        self,
        model: str,
        *,
        served_name: str | None = None,
        engine_arguments: Mapping[str, Any] | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        scheduling: EngineOptions | None = None,
        hybrid: HybridSetup | None = None,
        stall_seconds: float = 300.0,
    ) -> None:
        self.has_own_scheduler = scheduling is not None
        self.on_step: Callable[[EngineStep], None] | None = None
        self.model = served_name or model
        self._source = model
        self._arguments = dict(engine_arguments or {})
        self._parsers = (tool_parser, reasoning_parser)
        self._scheduling = scheduling
        self._hybrid = hybrid
        self._stall_seconds = stall_seconds
        self._engine: VllmEngine | None = None
        self._construction: asyncio.Future[VllmEngine] | None = None
        self._other_engine_pids: set[int | None] = set()
        self._is_start_cancelled = False

    async def start(self) -> None:
        """Raises ValueError for engine arguments that vLLM refuses, BackendDown when it cannot start."""
        if self._engine is not None or self._construction is not None:
            raise RuntimeError(f"engine of {self.model} was started before; stop it first")
        self._other_engine_pids, self._is_start_cancelled = (
            {process.pid for process in _engine_processes()},
            False,
        )
        try:
            engine_class = await _in_daemon_thread(_load_engine)
            self._construction = asyncio.ensure_future(asyncio.to_thread(self._construct, engine_class))
            # Shielded: a thread cannot be cancelled, so its engine must not be forgotten.
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
        self._engine = engine
        engine.stats.on_step = self._report_step
        self.geometry, self.kv_bytes = engine.geometry, engine.kv_bytes
        self.max_model_tokens, self.max_running = engine.max_model_tokens, engine.max_running
        self.step_cost = engine.step_cost
        engine.start_watchdog(self._engine_children(), stall_seconds=self._stall_seconds)
        try:
            await self._generate_one_token(engine)
            if engine.scheduler_client is not None:
                await engine.scheduler_client.connect(engine.step_cost)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Open streams end with BackendDown. Safe to call twice, and while `start` runs elsewhere."""
        if self._construction is not None:
            await self._abort_construction()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.fail_pending()
            await asyncio.to_thread(engine.shutdown)

    @property
    def stall_count(self) -> int:
        return int(self._engine is not None and self._engine.is_stalled)

    async def check(self) -> None:
        try:
            await asyncio.wait_for(self._require_engine().ping(), _CHECK_TIMEOUT_SECONDS)
        except TimeoutError as error:
            raise BackendDown(
                f"the engine of {self.model} did not answer within {_CHECK_TIMEOUT_SECONDS:.0f} s"
            ) from error

    async def render_chat(self, prompt: ChatPrompt) -> list[int]:
        tokenizer = self._require_engine().tokenizer
        if chat_template.text_length(prompt) > _LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(chat_template.render, tokenizer, prompt)
        return chat_template.render(tokenizer, prompt)

    async def tokenize(self, text: str) -> list[int]:
        tokenizer = self._require_engine().tokenizer
        if len(text) > _LONG_TEXT_CHARACTERS:
            return list(await asyncio.to_thread(tokenizer.encode, text))
        return list(tokenizer.encode(text))

    def generate(
        self,
        request: Request,
        prompt: Sequence[int],
        sampling: Sampling,
        chat: ChatPrompt | None = None,
        *,
        standing: Handoff = FIRST_HANDOFF,
    ) -> AsyncGenerator[Delta]:
        metadata = metadata_of(request, standing) if self.has_own_scheduler else None
        engine = self._require_engine()
        return engine.generate(
            request.id, prompt, sampling, chat, rank=standing.rank, done=standing.done, metadata=metadata
        )

    async def preempt(self, request_id: str) -> None:
        await self._require_engine().preempt(request_id)

    async def set_quota(self, quota_bytes: int) -> None:
        await self._require_engine().send_to_scheduler(lambda client: client.set_quota(quota_bytes))

    async def set_options(self, changes: Mapping[str, Any]) -> None:
        await self._require_engine().send_to_scheduler(lambda client: client.set_options(changes))

    def set_forecast(self, request_id: str, forecast: LengthForecast) -> None:
        if self._engine is not None and self._engine.scheduler_client is not None:
            self._engine.scheduler_client.set_forecast(request_id, forecast)

    def set_device_contention(self, *, is_shared: bool) -> None:
        if self._engine is not None and self._engine.scheduler_client is not None:
            self._engine.scheduler_client.set_device_contention(is_shared=is_shared)

    def state(self) -> EngineState:
        return self._require_engine().state()

    def _report_step(self, step: EngineStep) -> None:
        if self.on_step is not None:
            self.on_step(step)

    def _require_engine(self) -> "VllmEngine":
        if self._engine is None:
            raise BackendDown(f"the engine of {self.model} is not up")
        return self._engine

    def _construct(self, engine_class: "type[VllmEngine]") -> "VllmEngine":
        if self._is_start_cancelled:
            raise BackendDown(f"the start of {self.model} was given up")
        model = bundled_models.resolve(self._source)
        # A terminal's Ctrl-C reaches every process in the foreground, and vLLM's would drop what runs. A
        # process inherits what the thread that starts it does not hear: the server decides when work ends.
        # Python's resource tracker, started with the first process, would make the thread hear it again.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return engine_class(
            model, self.model, self._arguments, *self._parsers, self._scheduling, self._hybrid
        )

    async def _generate_one_token(self, engine: "VllmEngine") -> None:
        first = await self.tokenize("Hello")
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        async with aclosing(engine.generate(f"start-{self.model}", first, sampling, None)) as deltas:
            tokens = [token async for delta in deltas for token in delta.token_ids]
        if len(tokens) != 1:
            raise BackendDown(f"the engine of {self.model} gave {len(tokens)} tokens when asked for one")

    async def _abort_construction(self) -> None:
        """Gives up an engine under construction: without its process, the constructor fails at once. Nothing
        says when it starts one, and loading a model takes minutes."""
        construction, self._is_start_cancelled = self._construction, True
        assert construction is not None
        terminated: set[int | None] = set()
        while not construction.done():
            for process in self._engine_children():
                if process.pid not in terminated:
                    terminated.add(process.pid)
                    process.terminate()
            await asyncio.wait([construction], timeout=_POLL_SECONDS)
        with suppress(Exception):
            engine = await asyncio.shield(construction)
            await asyncio.to_thread(engine.shutdown)

    def _engine_children(self) -> list[BaseProcess]:
        """Those in which this engine runs."""
        return [process for process in _engine_processes() if process.pid not in self._other_engine_pids]


def _load_engine() -> "type[VllmEngine]":
    """Takes seconds."""
    # An operator's prompts and models are nobody else's business unless they say so.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # On a GPU vLLM would fork: from a process of many threads, whose locks, sockets and signals the engine
    # would share.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from backends.vllm.engine import VllmEngine

    return VllmEngine


async def _in_daemon_thread(work: Callable[[], Result]) -> Result:
    """Whoever gives up does not wait for it, nor does the loop's end or the interpreter's: for work that
    leaves nothing to clean up."""
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
