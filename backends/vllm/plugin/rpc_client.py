"""What does the gate tell its scheduler in the engine, and what does that one hold? The gate's end of both.

Orders go by the utility call (`control`), one after the other; forecasts that come within one turn of the
event loop go together. What is held stands on the board that the scheduler writes before each step. An
idle engine writes nothing: then what its last step held is free.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from backends.vllm.plugin.rpc import METHOD
from backends.vllm.plugin.shared_state import SharedState, StateReading, key_of
from backends.vllm.process import while_alive
from controlplane.core.clock import Duration
from controlplane.core.errors import Refused
from controlplane.core.forecast import LengthForecast
from controlplane.core.ports import EngineState, StepCost
from controlplane.core.view import Pace
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.registry import engine_policy

log = logging.getLogger(__name__)

# An engine that has had nothing to do for so long has no step in flight.
_IDLE_SETTLED_NS = 1_000_000_000


class SchedulerClient:
    """`llm` is vLLM's AsyncLLM; `total` blocks of `block_bytes` each can hold tokens."""

    def __init__(
        self, llm: Any, board: SharedState, options: EngineOptions, *, total: int, block_bytes: int
    ) -> None:
        self._llm = llm
        self._shared_state = board
        self._total = total
        self._block_bytes = block_bytes
        self._request_ids: dict[int, str] = {}
        self._forecasts: dict[str, LengthForecast] = {}
        self._sending: asyncio.Task[None] | None = None
        self._last: tuple[int, EngineState] | None = None
        self.options = options

    def track(self, request_id: str) -> None:
        self._request_ids[key_of(request_id)] = request_id

    def untrack(self, request_id: str) -> None:
        self._request_ids.pop(key_of(request_id), None)

    # --- orders ------------------------------------------------------------------------------

    async def connect(self, step_cost: StepCost | None) -> None:
        """Until its engine was told something, a scheduler does not know where messages arrive."""
        if step_cost is None:
            await self._call("state", None)
        else:
            await self._call("set_step_cost", list(astuple(step_cost)))

    async def set_quota(self, quota_bytes: int) -> None:
        blocks = quota_bytes // self._block_bytes
        if not 1 <= blocks <= self._total:
            raise Refused(
                f"quota of {quota_bytes} bytes of KV cache: at least one block of {self._block_bytes} and at "
                f"most the cache's {self._total * self._block_bytes}; a larger cache needs a restart"
            )
        await self._call("set_quota", blocks)

    async def set_options(self, changes: Mapping[str, Any]) -> None:
        try:
            options = self.options.changed(changes)
            engine_policy(options)
        except ValueError as error:
            raise Refused(f"scheduling.engine: {error}") from error
        await self._call("set_options", dict(changes))
        self.options = options

    def set_forecast(self, request_id: str, forecast: LengthForecast) -> None:
        self._forecasts[request_id] = forecast
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send_forecasts())

    def set_device_contention(self, *, is_shared: bool) -> None:
        self._shared_state.is_device_shared = is_shared

    async def _send_forecasts(self) -> None:
        while self._forecasts:
            forecasts, self._forecasts = self._forecasts, {}
            said = {
                name: {"levels": list(one.levels), "quantiles": list(one.tokens)}
                for name, one in forecasts.items()
            }
            try:
                await self._call("set_forecast", said)
            except Exception as error:
                log.warning("forecasts of %d requests did not reach the engine: %s", len(said), error)
                return

    async def _call(self, order: str, argument: Any) -> None:
        call = self._llm.engine_core.call_utility_async(METHOD, order, argument)
        await while_alive(self._llm, call)

    # --- state -------------------------------------------------------------------------------

    def state(self, *, is_idle: bool) -> EngineState:
        """`is_idle` if no request is in the engine. The same object until the engine's next step."""
        newest = self._shared_state.newest()
        if self._last is not None and self._last[0] == newest and not is_idle:
            return self._last[1]
        reading = self._shared_state.read()
        if reading is None:
            size = self._total * self._block_bytes
            return EngineState(0, size, 0, 0, 0, quota_bytes=size, held_bytes={})
        if is_idle:
            return self._idle_state(reading)
        self._last = (newest, self._state(reading))
        return self._last[1]

    def waited(self) -> Duration:
        """On purpose, since the engine's start."""
        return self.state(is_idle=False).waited

    def _state(self, reading: StateReading) -> EngineState:
        facts, size = reading.facts, self._block_bytes
        held: dict[str, int] = {}
        for key, _, blocks in reading.rows:
            # Samples of one request stand in rows of their own. A row without a name has just left.
            if (name := self._request_ids.get(key)) is not None:
                held[name] = held.get(name, 0) + blocks * size
        return EngineState(
            used_bytes=facts.used * size,
            total_bytes=facts.total * size,
            running=facts.running,
            waiting=facts.waiting,
            preemptions=facts.preemptions,
            recompute_tokens=facts.recompute_tokens,
            waited=Duration(facts.waited_ns),
            quota_bytes=facts.quota * size,
            ceded_bytes=facts.ceded * size,
            held_bytes=held,
            pace=_pace(reading),
        )

    def _idle_state(self, reading: StateReading) -> EngineState:
        facts, size = reading.facts, self._block_bytes
        is_settled = time.monotonic_ns() - facts.at_ns > _IDLE_SETTLED_NS
        ceded = facts.total - facts.quota if is_settled else facts.ceded
        return EngineState(
            used_bytes=0,
            total_bytes=facts.total * size,
            running=0,
            waiting=0,
            preemptions=facts.preemptions,
            recompute_tokens=facts.recompute_tokens,
            waited=Duration(facts.waited_ns),
            quota_bytes=facts.quota * size,
            ceded_bytes=ceded * size,
            held_bytes={},
            pace=_pace(reading),
        )


def _pace(reading: StateReading) -> Pace | None:
    facts = reading.facts
    if facts.step_ns == 0:
        return None
    return Pace(Duration(facts.step_ns), Duration(facts.prompt_token_ns))
