"""Scripted engines: test doubles of `Generator` and `Embedder` that follow a `Script` per request.

A request follows the next script of `upcoming`, or `default`. It advances on the event loop's clock
(durations in seconds; zero for at once) or, in an engine with `is_stepped`, only by `allow`. A token is a
UTF-8 byte. `runs` records every request and how it ended.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from backends.byte_codec import ByteCodec
from backends.embedding.pair_template import PairTemplate
from backends.embedding.truncation import Truncation
from backends.testing.scripted_engine import DEFAULT_SCRIPT, Script, ScriptedEngine, ScriptedRun
from controlplane.core.clock import Duration, Instant, seconds
from controlplane.core.engine_reports import DeviceSharing, EngineState, EngineStep, StepCost
from controlplane.core.errors import BackendDown, Refused
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import FIRST_HANDOFF, ChatPrompt, Delta, Handoff, Sampling, TokenLogprob
from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.pool_view import Pace
from controlplane.core.ports import EmbeddingPass, InTurn, PauseCost, TruncationSide, Vectors
from controlplane.core.request import Request
from controlplane.core.text_limits import TextLimit

__all__ = ["Script", "ScriptedEmbedder", "ScriptedGenerator", "ScriptedRun"]

_GEOMETRY = KvGeometry(elements_per_token=512, bytes_per_element=2, block_tokens=16)


class ScriptedGenerator(ScriptedEngine):
    """A `Generator` that produces scripted tokens.

    The first token takes `prefill_seconds` plus `prompt_token_seconds` for each prompt token, each other
    token `token_seconds`. With `has_tandem_scheduler` the engine accepts quota and options and records them
    for the test, without effect. The coroutine `on_order` runs before each of them and may raise or never
    return.
    """

    def __init__(
        self,
        *,
        model: str = "scripted",
        geometry: KvGeometry = _GEOMETRY,
        kv_bytes: int = 1_024 * _GEOMETRY.bytes_per_block,
        max_model_tokens: int = 4_096,
        max_running: int = 64,
        is_stepped: bool = False,
        default: Script = DEFAULT_SCRIPT,
        prefill_seconds: float = 0.0,
        prompt_token_seconds: float = 0.0,
        token_seconds: float = 0.0,
        has_tandem_scheduler: bool = False,
        has_prefix_cache: bool = False,
    ) -> None:
        super().__init__(model=model, max_running=max_running, is_stepped=is_stepped, default=default)
        self.has_tandem_scheduler = has_tandem_scheduler
        self.has_prefix_cache = has_prefix_cache
        self.step_cost: StepCost | None = None
        self.on_step: Callable[[EngineStep], None] | None = None
        self.on_order: Callable[[], Awaitable[None]] | None = None
        self.quota_bytes = self.use_ceiling_bytes = kv_bytes
        self.options: dict[str, Any] = {}
        self.forecasts: dict[str, LengthForecast] = {}
        self.is_sharing = False
        self.pace: Pace | None = None
        self.preempted: list[Any] = []
        self.geometry = geometry
        self.kv_bytes = kv_bytes
        self.max_model_tokens = max_model_tokens
        self.max_token_characters = 1
        self.max_prompt_logprobs = max_running
        self.sampling_defaults = None
        self.images = None
        self._prefill_seconds = prefill_seconds
        self._prompt_token_seconds = prompt_token_seconds
        self._token_seconds = token_seconds
        self._preemptions = 0
        self._can_tokenize = False

    async def start(self) -> None:
        """Starts the engine with its whole KV cache as quota."""
        await super().start()
        self._can_tokenize = True
        # A restarted engine has lost its quota.
        self.quota_bytes = self.use_ceiling_bytes = self.kv_bytes

    @property
    def codec(self) -> ByteCodec:
        """One token per UTF-8 byte."""
        return ByteCodec()

    async def tokenize(self, text: str) -> list[int]:
        """One token per UTF-8 byte."""
        await self._require_tokenizer()
        return list(text.encode())

    async def render_chat(self, prompt: ChatPrompt) -> list[int]:
        """Concatenates the texts of the messages. Raises Refused for other content and for too much of it."""
        await self._require_tokenizer()
        text = "".join(_content(message) for message in prompt.messages)
        TextLimit(self.model, self.max_model_tokens, 1).check(len(text), param="messages")
        return list(text.encode())

    async def check_grammar(
        self, sampling: Sampling, chat: ChatPrompt | None, *, tenant: str, in_turn: InTurn
    ) -> None:
        """Accepts every grammar: the tokens are scripted."""

    async def generate(
        self,
        request: Request,
        prompt: Sequence[int],
        sampling: Sampling,
        chat: ChatPrompt | None = None,
        *,
        handoff: Handoff = FIRST_HANDOFF,
    ) -> AsyncGenerator[Delta]:
        """Streams the scripted output. Raises what the script says."""
        run = ScriptedRun(request, self._next_script(), sampling, tuple(prompt), chat, handoff)
        if run.script.refusal is not None:
            raise Refused(run.script.refusal)
        if len(prompt) + sampling.max_tokens > self.max_model_tokens:
            raise Refused(
                f"{len(prompt)} prompt tokens and max_tokens={sampling.max_tokens}: the model holds "
                f"{self.max_model_tokens}; shorten the prompt or lower max_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        await self._begin(run)
        with self._ending(run):
            async with self._slots, contextlib.aclosing(self._deltas(run, sampling)) as deltas:
                async for delta in deltas:
                    yield delta

    async def preempt(self, request_id: str) -> None:
        """Ends the stream with `preempted` and waits until it has ended."""
        for run in self.live:
            if run.request.id == request_id:
                self._preemptions += 1
                run.is_preempted = True
                run.wake.set()
                await run.ended.wait()

    async def set_quota(self, quota_bytes: int, *, use_ceiling_bytes: int | None = None) -> None:
        """Records an order. Raises Refused unless one block <= quota <= use ceiling <= `kv_bytes`."""
        await self._accept_order()
        ceiling = quota_bytes if use_ceiling_bytes is None else use_ceiling_bytes
        if not self.geometry.bytes_per_block <= quota_bytes <= ceiling <= self.kv_bytes:
            raise Refused(
                f"quota of {quota_bytes} bytes, use ceiling of {ceiling}: choose one block to "
                f"{self.kv_bytes} bytes, the quota at most the ceiling"
            )
        self.quota_bytes, self.use_ceiling_bytes = quota_bytes, ceiling

    async def set_options(self, changes: Mapping[str, Any]) -> None:
        """Records changed options."""
        await self._accept_order()
        self.options |= changes

    def set_forecast(self, request_id: str, forecast: LengthForecast) -> None:
        """Records a forecast."""
        if self.has_tandem_scheduler:
            self.forecasts[request_id] = forecast

    def set_device_contention(self, *, is_shared: bool) -> None:
        """Records whether the device is shared."""
        self.is_sharing = is_shared

    async def _require_tokenizer(self) -> None:
        if not self._can_tokenize:
            await self.check()

    async def _accept_order(self) -> None:
        if not self.has_tandem_scheduler:
            raise Refused(
                f"scripted engine {self.model!r} takes no quota or options; "
                "create it with has_tandem_scheduler=True"
            )
        if self.on_order is not None:
            await self.on_order()
        await self.check()

    def state(self) -> EngineState:
        """Memory and queues that follow from the live runs. Raises BackendDown if the engine is down."""
        if self._down is not None:
            raise BackendDown(f"scripted engine {self.model!r}: {self._down}")
        running = self.live[: self.max_running]
        held = {
            run.request.id: self.geometry.bytes(len(run.prompt) + run.done) * run.request.sequences
            for run in running
        }
        used = sum(held.values())
        return EngineState(
            used_bytes=used,
            total_bytes=self.kv_bytes,
            running=len(running),
            waiting=len(self.live) - len(running),
            preemptions=self._preemptions,
            quota_bytes=self.quota_bytes if self.has_tandem_scheduler else None,
            use_ceiling_bytes=self.use_ceiling_bytes if self.has_tandem_scheduler else None,
            ceded_bytes=max(0, self.kv_bytes - max(self.use_ceiling_bytes, used)),
            held_bytes=held if self.has_tandem_scheduler else None,
            pace=self.pace,
            preempted=tuple(self.preempted),
        )

    async def _deltas(self, run: ScriptedRun, sampling: Sampling) -> AsyncGenerator[Delta]:
        length = sampling.max_tokens if run.script.tokens is None else run.script.tokens
        last = min(length, sampling.max_tokens)
        natural_end = "tool_calls" if run.script.tool_calls else "stop"
        reason = "length" if length >= sampling.max_tokens else natural_end
        prefill = self._prefill_seconds + self._prompt_token_seconds * len(run.prompt)
        if last == 0:
            await self._advance(run, prefill)
        while run.done < last:
            await self._advance(run, self._token_seconds if run.done else prefill)
            if run.is_preempted:
                break
            run.done += 1
            for index in range(sampling.n):
                yield _delta(run, sampling, index, reason if run.done == last else None)
        if last == 0 or run.is_preempted:
            end = "preempted" if run.is_preempted else reason
            for index in range(sampling.n):
                yield Delta(index, "", (), finish_reason=end)


def _delta(run: ScriptedRun, sampling: Sampling, index: int, finish_reason: str | None) -> Delta:
    position = run.done - 1 - len(run.script.reasoning_words)
    word = run.script.words[position % len(run.script.words)] if position >= 0 else ""
    thought = run.script.reasoning_words[position] if position < 0 else ""
    logprobs: tuple[TokenLogprob, ...] = ()
    if sampling.logprobs is not None:
        others = tuple((f"other{rank}", -1.0 - rank) for rank in range(sampling.logprobs))
        logprobs = (TokenLogprob(word or thought, -0.5, others, token_id=run.done),)
    return Delta(
        index,
        word,
        (run.done,),
        finish_reason=finish_reason,
        logprobs=logprobs,
        reasoning=thought,
        tool_calls=run.script.tool_calls if finish_reason == "tool_calls" else (),
        cached_tokens=run.script.cached_tokens if run.done == 1 else 0,
        prompt_logprobs=_prompt_logprobs(run, sampling) if run.done == 1 else (),
    )


def _prompt_logprobs(run: ScriptedRun, sampling: Sampling) -> tuple[TokenLogprob | None, ...]:
    if sampling.prompt_logprobs is None:
        return ()
    return (None, *(TokenLogprob(f"byte{token}", -0.25) for token in run.prompt[1:]))


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content if part.get("type") == "text"]
    if len(texts) != len(content):
        raise Refused("only text is passed on to a model; remove the other parts", param="messages")
    return "".join(texts)


class ScriptedEmbedder(ScriptedEngine):
    """An `Embedder` with scripted failures; with `dimension=2` also a `Reranker`.

    A call is one step of `call_seconds` plus `token_seconds` for each token. Vectors depend on the token ids
    only and have unit length.
    """

    def __init__(
        self,
        *,
        model: str = "scripted-embedding",
        dimension: int = 8,
        supported_dimensions: Sequence[int] | None = None,
        max_input_tokens: int = 512,
        batch_tokens: int = 4_096,
        bytes_per_token: int = 1_024,
        max_running: int = 64,
        is_stepped: bool = False,
        default: Script = DEFAULT_SCRIPT,
        call_seconds: float = 0.0,
        token_seconds: float = 0.0,
        prompts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(model=model, max_running=max_running, is_stepped=is_stepped, default=default)
        self.dimension = dimension
        self.supported_dimensions = supported_dimensions or (dimension,)
        self.on_pass: Callable[[EmbeddingPass], None] | None = None
        self.on_computing: Callable[[bool], None] | None = None
        self.pause_cost: Callable[[], PauseCost | None] | None = None
        self.prompts: Mapping[str, str] = prompts or {}
        self.max_input_tokens = max_input_tokens
        self.max_token_characters = 1
        self.vocabulary = 2**32
        self.special_tokens: tuple[Sequence[int], Sequence[int]] = ((), ())
        self._batch_tokens = batch_tokens
        self._bytes_per_token = bytes_per_token
        self.budget_bytes = self.workspace_bytes
        self.allocator_bytes = self.restarts = self.out_of_memory = 0
        self._call_seconds = call_seconds
        self._token_seconds = token_seconds

    @property
    def is_computing(self) -> bool:
        """Whether a call is in progress."""
        return bool(self.live)

    def tokens_left(self, request_id: str) -> int | None:
        """Tokens of a live request; None for an unknown one."""
        run = next((run for run in self.live if run.request.id == request_id), None)
        return None if run is None else sum(map(len, run.inputs))

    @property
    def pass_tokens(self) -> int:
        """Most padded tokens of one pass."""
        return max(self._batch_tokens, self.max_input_tokens)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the largest batch."""
        return max(self._batch_tokens, self.max_input_tokens) * self._bytes_per_token

    def set_budget_bytes(self, budget_bytes: int) -> None:
        """Records a budget."""
        self.budget_bytes = budget_bytes

    def truncate(
        self, token_ids: Sequence[int], limit: int, side: TruncationSide | None = None
    ) -> Sequence[int]:
        """Cuts `token_ids` to `limit`."""
        return Truncation().truncate(token_ids, limit, side)

    def pair(
        self, query: Sequence[int], document: Sequence[int], limit: int, side: TruncationSide | None = None
    ) -> Sequence[int]:
        """Joins both without special tokens."""
        return PairTemplate((), (), (), 0).join(query, document, limit, side)

    @property
    def sharing(self) -> DeviceSharing:
        """Its calls delay no step."""
        return DeviceSharing.BESIDE

    def batch_time(self, token_counts: Sequence[int]) -> Duration:
        """Time of one call with these inputs."""
        return seconds(self._call_seconds + self._token_seconds * sum(token_counts))

    async def tokenize(self, texts: Sequence[str], *, prompt: str | None = None) -> list[list[int]]:
        """One token per UTF-8 byte. Raises Refused for an unknown prompt."""
        await self.check()
        if prompt is not None and prompt not in self.prompts:
            raise Refused(
                f"prompt_name={prompt!r}: unknown prompt; choose one of `prompts`", param="prompt_name"
            )
        prefix = "" if prompt is None else self.prompts[prompt]
        return [list((prefix + text).encode()) for text in texts]

    def batch_bytes(self, token_counts: Sequence[int]) -> int:
        """Largest number of bytes that these inputs take while they are computed."""
        padded = len(token_counts) * max(token_counts, default=0)
        return min(padded, max(self._batch_tokens, self.max_input_tokens)) * self._bytes_per_token

    async def embed(
        self, request: Request, inputs: Sequence[Sequence[int]], *, deadline: Instant | None
    ) -> Vectors:
        """Returns vectors after one step. Raises what the script says."""
        run = ScriptedRun(request, self._next_script(), inputs=tuple(map(tuple, inputs)), deadline=deadline)
        if run.script.refusal is not None:
            raise Refused(run.script.refusal)
        await self._begin(run)
        self._announce()
        with self._ending(run):
            async with self._slots:
                tokens = sum(map(len, inputs))
                start = asyncio.get_running_loop().time()
                await self._advance(run, self._call_seconds + self._token_seconds * tokens)
                if self.on_pass is not None:
                    took = seconds(asyncio.get_running_loop().time() - start)
                    self.on_pass(EmbeddingPass(len(inputs), tokens, tokens, took, requests=[request.id]))
        self._announce()
        return np.stack([_vector(ids, self.dimension) for ids in run.inputs])

    def _announce(self) -> None:
        if self.on_computing is not None:
            self.on_computing(self.is_computing)


def _vector(ids: Sequence[int], dimension: int) -> Vectors:
    direction = np.random.default_rng([len(ids), *ids]).normal(size=dimension)
    found: Vectors = (direction / np.linalg.norm(direction)).astype(np.float32)
    return found
