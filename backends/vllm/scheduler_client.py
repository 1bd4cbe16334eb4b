"""The server's client of Tandem's scheduler: sends commands and reads the shared state.

Commands go through the utility call of `rpc`, one after the other; forecasts set within one iteration of the
event loop are sent together. State is read from the shared memory that the scheduler writes in each step. An
idle engine writes nothing, so without requests the blocks held by its last step count as free.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

from backends.vllm.plugin import preemption_log
from backends.vllm.plugin.rpc import METHOD
from backends.vllm.plugin.shared_state import EngineFacts, SharedState, StateReading, key_of
from backends.vllm.process import while_alive
from controlplane.core.clock import Duration, Instant
from controlplane.core.engine_reports import EnginePreemption, EngineState, StepCost
from controlplane.core.errors import Refused
from controlplane.core.forecast import LengthForecast
from controlplane.core.pool_view import Pace
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.registry import engine_policy

log = logging.getLogger(__name__)

# An engine without requests for this long has no step in flight.
_IDLE_SETTLED_NS = 1_000_000_000
# Requests whose names are known for preemptions that are read after their end.
_ENDED = 256


class SchedulerClient:
    """Commands and state of one Tandem scheduler in an EngineCore process.

    Args:
        llm: vLLM's AsyncLLM.
        shared_state: the memory that the scheduler writes.
        options: the scheduler's options at its start.
        total: blocks that can hold tokens.
        block_bytes: bytes of a block over all layers.
    """

    def __init__(
        self, llm: Any, shared_state: SharedState, options: EngineOptions, *, total: int, block_bytes: int
    ) -> None:
        self._llm = llm
        self._shared_state = shared_state
        self._total = total
        self._block_bytes = block_bytes
        self._request_ids: dict[int, str] = {}
        self._ended_ids: OrderedDict[int, str] = OrderedDict()
        self._preempted: tuple[bytes, tuple[EnginePreemption, ...]] = (b"", ())
        self._forecasts: dict[str, LengthForecast] = {}
        self._sending: asyncio.Task[None] | None = None
        self._last: tuple[int, EngineState] | None = None
        self.options = options

    def track(self, request_id: str) -> None:
        """Includes the request in `held_bytes` from now on."""
        self._request_ids[key_of(request_id)] = request_id

    def untrack(self, request_id: str) -> None:
        """Excludes a request that has ended."""
        key = key_of(request_id)
        if self._request_ids.pop(key, None) is not None:
            self._ended_ids[key] = request_id
        if len(self._ended_ids) > _ENDED:
            self._ended_ids.popitem(last=False)

    # --- commands ----------------------------------------------------------------------------

    async def connect(self, step_cost: StepCost | None) -> None:
        """Makes the first call, which gives the scheduler its input queue, and sets the step cost."""
        if step_cost is None:
            await self._call("state", None)
        else:
            await self._call("set_step_cost", list(astuple(step_cost)))

    async def set_quota(self, quota_bytes: int, *, use_ceiling_bytes: int | None = None) -> None:
        """Sets the quota and the use ceiling in whole blocks.

        Raises Refused unless one block <= quota <= use ceiling <= cache.
        """
        ceiling_bytes = quota_bytes if use_ceiling_bytes is None else use_ceiling_bytes
        blocks, ceiling = quota_bytes // self._block_bytes, ceiling_bytes // self._block_bytes
        if not 1 <= blocks <= ceiling <= self._total:
            raise Refused(
                f"quota of {quota_bytes} bytes with a use ceiling of {ceiling_bytes}: must be at least one "
                f"block of {self._block_bytes} and at most the cache's {self._total * self._block_bytes}, "
                "the quota at most the ceiling; a larger cache needs a restart"
            )
        await self._call("set_quota", [blocks, ceiling])

    async def set_options(self, changes: Mapping[str, Any]) -> None:
        """Changes scheduling options, checked here before they are sent. Raises Refused."""
        try:
            options = self.options.changed(changes)
            engine_policy(options)
        except ValueError as error:
            raise Refused(f"scheduling.engine: {error}") from error
        await self._call("set_options", dict(changes))
        self.options = options

    def set_forecast(self, request_id: str, forecast: LengthForecast) -> None:
        """Sends a new length forecast in the background; a failure is logged."""
        self._forecasts[request_id] = forecast
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send_forecasts())

    def set_device_contention(self, *, is_shared: bool) -> None:
        """Signals to the scheduler through shared memory whether an embedding pass is under way."""
        self._shared_state.is_device_shared = is_shared

    async def _send_forecasts(self) -> None:
        while self._forecasts:
            forecasts, self._forecasts = self._forecasts, {}
            argument = {
                name: {"levels": list(forecast.levels), "quantiles": list(forecast.tokens)}
                for name, forecast in forecasts.items()
            }
            try:
                await self._call("set_forecast", argument)
            except Exception as error:
                log.warning("could not send forecasts of %d requests to the engine: %s", len(argument), error)
                return

    async def _call(self, command: str, argument: Any) -> None:
        call = self._llm.engine_core.call_utility_async(METHOD, command, argument)
        await while_alive(self._llm, call)

    # --- state -------------------------------------------------------------------------------

    def state(self, *, is_idle: bool) -> EngineState:
        """The engine's memory and queue lengths at its latest step; the same object until the next step.

        `is_idle` states that the engine has no request. Each such call makes a new object, because blocks
        count as ceded once an idle engine has settled; the last one is kept until the next step. Raises
        TornRead.
        """
        if self._last is not None and self._last[0] == self._shared_state.newest() and not is_idle:
            return self._last[1]
        reading = self._shared_state.read()
        if reading is None:
            size = self._total * self._block_bytes
            return EngineState(0, size, 0, 0, 0, quota_bytes=size, use_ceiling_bytes=size, held_bytes={})
        state = self._state(reading)
        # Not the newest number: where the latest write was under way, this is the state of the one before.
        self._last = reading.sequence, self._without_requests(state, reading.facts) if is_idle else state
        return self._last[1]

    def waited(self) -> Duration:
        """Time for which the scheduler has delayed steps on purpose since the engine's start."""
        return self.state(is_idle=False).waited

    def _state(self, reading: StateReading) -> EngineState:
        facts, size = reading.facts, self._block_bytes
        held: dict[str, int] = {}
        for key, blocks in reading.rows:
            # Each sample of a request has a row of its own. A row without a tracked request has just ended.
            if (name := self._request_ids.get(key)) is not None:
                held[name] = held.get(name, 0) + blocks * size
        return EngineState(
            used_bytes=facts.used * size,
            total_bytes=facts.total * size,
            running=facts.running,
            waiting=facts.waiting,
            preemptions=facts.preemptions,
            recompute_tokens=facts.recompute_tokens,
            preempted=self._named(reading.preempted),
            waited=Duration(facts.waited_ns),
            quota_bytes=facts.quota * size,
            use_ceiling_bytes=facts.use_ceiling * size,
            ceded_bytes=facts.ceded * size,
            held_bytes=held,
            pace=_pace(reading),
        )

    def _named(self, rows: bytes) -> tuple[EnginePreemption, ...]:
        """The preemptions of these rows by request id, read once; those of unknown requests are left out."""
        if rows == self._preempted[0]:
            return self._preempted[1]
        names = self._ended_ids | self._request_ids
        found = tuple(
            EnginePreemption(Instant(row.at_ns), names[row.victim], names.get(row.beneficiary), row.tokens)
            for row in preemption_log.unpacked(rows)
            if row.victim in names
        )
        self._preempted = rows, found
        return found

    def _without_requests(self, state: EngineState, facts: EngineFacts) -> EngineState:
        """The state after the requests of the latest step have ended; an idle engine publishes none."""
        is_settled = time.monotonic_ns() - facts.at_ns > _IDLE_SETTLED_NS
        ceded = facts.total - facts.use_ceiling if is_settled else facts.ceded
        return replace(
            state, used_bytes=0, running=0, waiting=0, held_bytes={}, ceded_bytes=ceded * self._block_bytes
        )


def _pace(reading: StateReading) -> Pace | None:
    facts = reading.facts
    if facts.step_ns == 0:
        return None
    return Pace(Duration(facts.step_ns), Duration(facts.prompt_token_ns))
