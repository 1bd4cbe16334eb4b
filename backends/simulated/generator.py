"""Simulated LLM on a simulated device.

A `SimulatedDevice` gives each of its steps to all kinds of work. The LLM's part is scheduled as by vLLM: by
its own scheduler, or by an engine policy (`PolicyScheduler`). Then the engine is controlled as the plug-in
is: a command takes effect between two steps, and the state is that of the latest one. All tokens are equal.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from backends.byte_codec import ByteCodec
from backends.cost_models.step_time import StepLoad
from backends.simulated.continuous_batching import RankedScheduler, SimulatedScheduler
from backends.simulated.policy_scheduler import PolicyScheduler
from backends.simulated.pool_blocks import pool_blocks
from backends.simulated.sample_streams import (
    Sample,
    SampleStream,
    TakeDelta,
    TokenDeltas,
    open_stream,
    put_under_policy,
)
from backends.simulated.shared_device import SimulatedDevice
from backends.simulated.step_pacing import StepPacing
from controlplane.core.clock import Duration, Instant, between, seconds
from controlplane.core.engine_reports import EngineState, EngineStep, StepCost
from controlplane.core.errors import BackendDown, Refused
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import FIRST_HANDOFF, ChatPrompt, Delta, Handoff, Sampling
from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.ports import InTurn
from controlplane.core.request import Request
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.registry import engine_policy

_ASKED_AT_ONCE = 8
_RETRY_SECONDS = 0.001
"""An idle engine whose policy offers none of the waiting requests is asked at once, then at this interval."""


class SimulatedGenerator:
    """`Generator` on a `SimulatedDevice`.

    `takers` are called with each delta of their request but the last, which its stream then leaves out.

    Args:
        device: shared device.
        geometry: size of blocks and tokens of the KV cache.
        lengths: true output length of a request, which the gate does not see.
        kv_bytes: KV cache; None for one in which all requests fit.
        model: name.
        max_model_tokens: longest sequence.
        max_running: sequences in a batch.
        step_tokens: tokens in a step (chunked prefill).
        scheduling: options of the engine policy; None for vLLM's own scheduler.
        is_ranked: vLLM's own scheduler goes by the gate's rank and not by arrival.
        has_prefix_cache: requests share the blocks of equal prefixes, and find those of earlier ones.
        delivery: seconds from the end of a step until its tokens are delivered, and in addition for each.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        *,
        geometry: KvGeometry,
        lengths: Callable[[Request], int],
        kv_bytes: int | None,
        model: str = "simulated",
        max_model_tokens: int = 4_096,
        max_running: int = 256,
        step_tokens: int = 2_048,
        scheduling: EngineOptions | None = None,
        is_ranked: bool = False,
        has_prefix_cache: bool = False,
        delivery: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        blocks = pool_blocks(geometry, kv_bytes, max_model_tokens, max_running)
        self.model = model
        self.stall_count = 0
        self.has_tandem_scheduler = scheduling is not None
        self.has_prefix_cache = has_prefix_cache
        self.step_cost: StepCost | None = None
        self.on_step: Callable[[EngineStep], None] | None = None
        self.on_down: Callable[[str], None] | None = None
        self.takers: dict[str, TakeDelta] = {}
        self.geometry = geometry
        self.kv_bytes = blocks * geometry.bytes_per_block
        self.max_model_tokens = max_model_tokens
        self.max_token_characters = 1
        self.max_running = max_running
        self.max_prompt_logprobs = 0
        self.sampling_defaults = None
        self.images = None
        self._device = device
        self._lengths = lengths
        self.retry_at: float | None = None
        self._policy: PolicyScheduler[Sample] | None = None
        self._engine: SimulatedScheduler[Sample]
        self._scheduling, self._is_ranked = scheduling, is_ranked
        self._sizes = {
            "blocks": blocks,
            "block_tokens": geometry.block_tokens,
            "max_running": max_running,
            "step_tokens": step_tokens,
        }
        self._down: str | None = None
        self._reset()
        self._generations: dict[str, SampleStream] = {}
        self._tokens = TokenDeltas(*delivery)
        self._pacing = StepPacing()
        self._step_counts = (0, 0, 0)
        self._is_stepping = False
        self._load: StepLoad | None = None
        self._last_end: Instant | None = None
        self._next_plan: asyncio.Future[None] | None = None
        self._state: EngineState | None = None
        self._gate_preemptions = 0
        self._gate_recompute_tokens = 0
        device.attach(self)

    def _reset(self) -> None:
        """Creates the scheduler anew: without requests, with its first options and the whole KV cache."""
        if self._scheduling is not None:
            self._engine = self._policy = PolicyScheduler(self._scheduling, **self._sizes)
        else:
            stock = RankedScheduler if self._is_ranked else SimulatedScheduler
            self._engine = stock(**self._sizes, reserves_prompts=True)

    async def start(self) -> None:
        """Starts the device if it is stopped, and a new scheduler after a death."""
        if self._down is not None:
            self._reset()
            self._down, self._state = None, None
            self._last_end = None
        self._device.start()

    def die(self, reason: str = "died") -> None:
        """Fails the generations, and all calls until the next start; the device serves other work.

        `on_down` is called here only: a failure of the device is a defect of the simulation.
        """
        self._down = reason
        self.fail(reason)
        if self.on_down is not None:
            self.on_down(reason)

    async def stop(self) -> None:
        """Stops the device if no other backend uses it."""
        await self._device.stop()

    async def check(self) -> None:
        """Raises BackendDown if the engine or the device is down."""
        self._require_up()

    @property
    def codec(self) -> ByteCodec:
        """One token per UTF-8 byte."""
        return ByteCodec()

    async def tokenize(self, text: str) -> list[int]:
        """One token per UTF-8 byte."""
        self._device.require_up()
        return list(text.encode())

    async def render_chat(self, prompt: ChatPrompt) -> list[int]:
        """Concatenates the contents of the messages."""
        self._device.require_up()
        return list("".join(str(message.get("content") or "") for message in prompt.messages).encode())

    async def check_grammar(
        self, sampling: Sampling, chat: ChatPrompt | None, *, tenant: str, in_turn: InTurn
    ) -> None:
        """Accepts every grammar: the simulated output has none."""

    async def generate(
        self,
        request: Request,
        prompt: Sequence[int],
        sampling: Sampling,
        chat: ChatPrompt | None = None,
        *,
        handoff: Handoff = FIRST_HANDOFF,
    ) -> AsyncGenerator[Delta]:
        """Streams one delta per token and sample. Raises Refused if prompt and output do not fit."""
        self._require_up()
        if sampling.max_tokens < 1 or len(prompt) + sampling.max_tokens > self.max_model_tokens:
            raise Refused(
                f"{len(prompt)} prompt tokens and max_tokens={sampling.max_tokens}: the simulated model "
                f"generates at least 1 and holds {self.max_model_tokens}; change prompt or max_tokens",
                param="max_tokens",
            )
        # A resumed request has its previous output in the prompt.
        left = self._lengths(request) - (len(prompt) - request.prompt_tokens)
        generation = open_stream(
            request.id,
            prompt,
            left=left,
            max_tokens=sampling.max_tokens,
            samples=sampling.n,
            cached_by=self.geometry.block_tokens if self.has_prefix_cache else None,
            take=self.takers.get(request.id),
        )
        now = self._device.now()
        if self._policy is not None:
            put_under_policy(generation, request, handoff, max_tokens=sampling.max_tokens, now=now)
        for sample in generation.samples:
            sample.arrived = now
            if self._policy is None:
                sample.rank = handoff.rank
            self._engine.add(sample)
        self._state = None
        self._generations[request.id] = generation
        self._device.wake()
        try:
            while (delta := await generation.next()) is not None:
                yield delta
        finally:
            self._remove(generation)
            self._generations.pop(request.id, None)

    async def preempt(self, request_id: str) -> None:
        """Removes the request from the engine and ends its stream with `preempted`."""
        generation = self._generations.get(request_id)
        if generation is None:
            return
        self._gate_recompute_tokens += sum(map(self._engine.recompute, generation.samples))
        for sample in self._remove(generation):
            self._gate_preemptions += 1
            generation.push(Delta(sample.index, "", (), finish_reason="preempted"))

    async def set_quota(self, quota_bytes: int, *, use_ceiling_bytes: int | None = None) -> None:
        """Sets quota and use ceiling, from the next step on.

        Raises Refused unless one block <= quota <= ceiling <= `kv_bytes`.
        """
        engine, size = self._require_policy(), self.geometry.bytes_per_block
        ceiling_bytes = use_ceiling_bytes or quota_bytes
        blocks, ceiling = quota_bytes // size, ceiling_bytes // size
        if not 1 <= blocks <= ceiling <= engine.total_blocks:
            raise Refused(
                f"quota of {quota_bytes} bytes, use ceiling of {ceiling_bytes}: choose one block to "
                f"{self.kv_bytes} bytes, the quota at most the ceiling"
            )
        engine.set_quota(blocks, ceiling)
        await self._confirm(engine)

    async def set_options(self, changes: Mapping[str, Any]) -> None:
        """Changes options of the engine policy. Raises Refused."""
        engine = self._require_policy()
        try:
            engine_policy(engine.options.changed(changes))
        except ValueError as error:
            raise Refused(f"scheduling.engine: {error}") from error
        engine.set_options(changes)
        await self._confirm(engine)

    def set_forecast(self, request_id: str, forecast: LengthForecast) -> None:
        """Replaces the forecast of a request, if a policy schedules it."""
        generation = self._generations.get(request_id)
        if self._policy is not None and generation is not None:
            for sample in generation.samples:
                if not sample.is_removed:
                    self._policy.set_forecast(sample, forecast)

    def set_device_contention(self, *, is_shared: bool) -> None:
        """Delays the next step to the end of the pass, as far as the TPOT objectives allow.

        A pass on the same device has ended before the next step is planned.
        """
        self._pacing.set_shared(is_shared=is_shared)
        if not is_shared:
            self._device.wake()

    def _require_up(self) -> None:
        self._device.require_up()
        if self._down is not None:
            raise BackendDown(f"simulated engine: {self._down}")

    def _require_policy(self) -> PolicyScheduler[Sample]:
        self._require_up()
        if self._policy is None:
            raise Refused(f"{self.model!r} has vLLM's own scheduler, which takes no quota and no options")
        return self._policy

    async def _confirm(self, engine: PolicyScheduler[Sample]) -> None:
        """Returns once the engine has applied a command: with its next step if one is in flight."""
        self._state = None
        if not self._is_stepping:
            engine.sync_idle()
            self._device.wake()
            return
        if self._next_plan is None:
            self._next_plan = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_plan)
        self._require_up()

    def state(self) -> EngineState:
        """Memory, queues and preemptions as of the latest step. Raises BackendDown."""
        self._require_up()
        if self._state is None:
            self._state = self._new_state()
        return self._state

    def _new_state(self) -> EngineState:
        size, engine, policy = self.geometry.bytes_per_block, self._engine, self._policy
        held: dict[str, int] | None = None
        if policy is not None:
            held = {}
            for sample in policy.running:
                # Of the readers of a shared block one counts it.
                if blocks := sample.blocks - sample.state.shared + sample.state.carried:
                    name = sample.generation.request_id
                    held[name] = held.get(name, 0) + blocks * size
        return EngineState(
            used_bytes=engine.used_blocks * size,
            total_bytes=self.kv_bytes,
            running=len(engine.running),
            waiting=engine.waiting_count,
            preemptions=engine.preemptions + self._gate_preemptions,
            quota_bytes=None if policy is None else policy.quota * size,
            use_ceiling_bytes=None if policy is None else policy.use_ceiling * size,
            ceded_bytes=0 if policy is None else policy.ceded * size,
            held_bytes=held,
            pace=None if policy is None else policy.pace_estimator.pace,
            recompute_tokens=engine.recompute_tokens + self._gate_recompute_tokens,
            preempted=() if policy is None else policy.preempted,
        )

    @property
    def step_bytes(self) -> int:
        """Bytes of all blocks in use in the step planned last."""
        return self._engine.used_blocks * self.geometry.bytes_per_block

    def plan(self, load: StepLoad) -> bool:
        """Adds the LLM's next batch to `load`; returns False if it has none."""
        self.retry_at = None
        has_work = (
            self._engine.plan(load) if self._policy is None else self._plan_by_policy(self._policy, load)
        )
        self._step_counts = (load.prefill_tokens, load.decodes, load.cells)
        self._is_stepping = has_work
        self._state = None
        if self._next_plan is not None:
            self._next_plan.set_result(None)
            self._next_plan = None
        return has_work

    def _plan_by_policy(self, engine: PolicyScheduler[Sample], load: StepLoad) -> bool:
        now = self._device.now()
        if (begin := self._pacing.step_start(engine, now)) > now:
            self.retry_at = begin / 1e9
            return False
        is_alone = self._pacing.was_alone() and (self._load is None or not self._load.inputs)
        engine.observe_step(now, is_alone=is_alone, waited=self._pacing.waited)
        # The embedder adds its batch to the load after this call.
        self._load = load
        for _ in range(_ASKED_AT_ONCE):
            if not engine.waiting_count and not engine.running:
                engine.sync_idle()
                return False
            engine.arrange(now)
            if engine.plan(load):
                return True
        self.retry_at = now / 1e9 + _RETRY_SECONDS
        return False

    def complete(self, duration: float) -> None:
        """Delivers the tokens of the planned step."""
        self._report_step(seconds(duration))
        self._tokens.deliver(self._engine.complete(), self._device.loop)

    def _report_step(self, took: Duration) -> None:
        """Reports the step that ends, with the pause before it if it followed another."""
        now = self._device.now()
        if self._policy is not None and self._last_end is not None:
            took = between(self._last_end, now)
        if self.on_step is not None:
            self.on_step(EngineStep(*self._step_counts, took, self._pacing.waited))
        self._last_end = now if self._engine.running else None

    def fail(self, reason: str) -> None:
        """Fails all generations with BackendDown."""
        if self._next_plan is not None:
            self._next_plan.set_result(None)
            self._next_plan = None
        for generation in self._generations.values():
            self._remove(generation)
            generation.fail(reason)
        self._engine.drop_cache()

    def _remove(self, generation: SampleStream) -> list[Sample]:
        """Removes the unfinished samples from the engine and returns them."""
        left = [sample for sample in generation.samples if not sample.is_removed]
        for sample in left:
            self._engine.remove(sample)
        self._state = None
        return left
