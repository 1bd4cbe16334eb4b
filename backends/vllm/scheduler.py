"""vLLM's schedulers extended with Tandem's engine policies, as an out-of-tree scheduler class.

    vllm serve MODEL --scheduler-cls backends.vllm.scheduler.make

The extension wraps vLLM's own `schedule()` and copies nothing of it. Before each step:

1. The step waits for the end of an embedding pass as far as TPOT objectives allow (`decode_pacing`).
2. The tokens generated since the previous step are recorded (`batch_view`).
3. The KV-cache quota is enforced (`balloon`).
4. The engine policy chooses the requests to preempt and those that may start.
5. vLLM schedules as usual, but its waiting queue shows only the offered requests (`offer_queue`).

If blocks still run out, vLLM preempts the running request with the largest `priority`. That field is used for
nothing else here and holds the policy's ranking. The policy's state of a request is stored on vLLM's object
as `tandem`, because a dictionary lookup in every step takes longer.

Options come from `additional_config["tandem"]` (see `EngineOptions`; `default` applies to requests without
metadata) and can be changed while the engine runs (`plugin.rpc`). Importing this module imports vLLM.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from queue import Queue
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler

from backends.vllm.compat import max_running_requests
from backends.vllm.plugin import rpc
from backends.vllm.plugin.balloon import balloon_of
from backends.vllm.plugin.batch_view import BatchTracker, is_ending, require_one_group, stamp
from backends.vllm.plugin.input_wait import wait_for_input
from backends.vllm.plugin.offer_queue import OfferQueue, SkippedQueue
from backends.vllm.plugin.preemption_log import PreemptionLog
from backends.vllm.plugin.prefix_sharing import prefix_sharing
from backends.vllm.plugin.request_intake import RequestIntake
from backends.vllm.plugin.request_metadata import Defaults, defaults_of
from backends.vllm.plugin.shared_state import EngineFacts, SharedState
from controlplane.core.clock import Duration, Instant, between
from controlplane.core.engine_reports import StepCost
from controlplane.core.forecast import LengthForecast
from controlplane.core.pool_view import UNKNOWN_PACE
from controlplane.policy.engine.decode_pacing import next_step_start
from controlplane.policy.engine.interface import RANKED, EnginePolicy, EngineView
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.registry import engine_policy
from predictors.timing.online_step_time import ObservedPace, StepWork

if TYPE_CHECKING:
    _Base = Scheduler
else:
    _Base = object


class TandemScheduling(_Base):  # type: ignore[misc, valid-type]
    """Tandem's scheduling as a mixin; precedes one of vLLM's schedulers in the bases."""

    has_packed = False
    """Whether requests may differ in the number of tokens per block."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_one_group(self.kv_cache_config)
        config = (self.vllm_config.additional_config or {}).get("tandem", {})
        self.options, defaults = _parse_config(config)
        self._intake = RequestIntake(defaults)
        self.engine_policy: EnginePolicy = engine_policy(self.options)
        self.clock: Callable[[], int] = time.monotonic_ns
        self.balloon = balloon_of(self.kv_cache_manager.block_pool)
        self.quota: int = self.balloon.total
        self.use_ceiling: int = self.balloon.total
        self.preemptions = PreemptionLog()
        self.waited_ns = 0
        self.steps = 0
        self.hook_ns = 0
        self.set_step_cost(None)
        self.input_queue: Queue[Any] | None = None
        self.process_inputs: Callable[[], None] = _no_input
        self._shared_state = SharedState.from_environment()
        self._sharing = prefix_sharing(self.kv_cache_manager, self.block_size)
        has_drafts = self.num_spec_tokens > 0
        self._tracker = BatchTracker(
            self.block_size,
            has_packed=self.has_packed,
            runs_ahead=has_drafts or isinstance(self, AsyncScheduler),
            takes_back=has_drafts or self.connector is not None,
            sharing=self._sharing,
        )
        self._previous_schedule: Instant | None = None
        self._previous_step_start: Instant | None = None
        self._steps_in_flight: deque[StepWork] = deque()
        self._finished_steps: list[StepWork] = []
        self._is_pass_under_way = False
        self._passes_begun = 0
        self._previous_used = 0
        self._preemption_order: list[Any] = []
        # Under this policy vLLM preempts the largest `priority`; its priority queue is replaced.
        self.policy = SchedulingPolicy.PRIORITY
        self.waiting = OfferQueue(self._on_enqueue, self._on_dequeue)
        if hasattr(self, "skipped_waiting"):
            self.skipped_waiting = SkippedQueue(self.waiting)

    # --- one step ----------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the policy's plan, runs vLLM's `schedule()` and publishes the resulting state."""
        is_alone = not self._read_device_contention()
        waited = self._delay_step()
        self.waited_ns += waited
        began = time.perf_counter_ns()
        now = Instant(self.clock())
        self._observe_step(now, waited, is_alone=is_alone)
        self._plan(now)
        self.steps += 1
        self.hook_ns = time.perf_counter_ns() - began
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            not_started = self.waiting.close()
        began = time.perf_counter_ns()
        scheduled = output.num_scheduled_tokens
        prefill = output.total_num_scheduled_tokens - len(scheduled)
        work = StepWork(prefill, len(scheduled), self.balloon.used * self.block_size)
        if scheduled:
            self._steps_in_flight.append(work)
        self._previous_schedule, self._previous_step_start = now, now if scheduled else None
        self._tracker.record_step(self.running, scheduled, output.total_num_scheduled_tokens)
        if self._sharing is not None:
            self._sharing.waiting.recheck(not_started)
        self._publish(now)
        self._previous_used = self.balloon.used
        self.hook_ns += time.perf_counter_ns() - began
        return output

    def _delay_step(self) -> Duration:
        """Delays the step while an embedding pass is under way and no TPOT is missed; returns the delay.

        No step is delayed while requests wait. A new request and the end of the pass end the delay. Under
        asynchronous scheduling vLLM reads the output of the step in flight only after this call, so there is
        no delay where that step ends every request.
        """
        if not self._is_pass_under_way or self._previous_step_start is None or len(self.waiting):
            return Duration(0)
        if all(map(is_ending, self.running)):
            return Duration(0)
        last, now = self._previous_step_start, Instant(self.clock())
        began = now
        self._stamp(now)
        # Input is processed here, so that a request that ends the delay can start in this step.
        while not len(self.waiting):
            begin = next_step_start(
                self._tracker.batch,
                last,
                now,
                self.options.decode_pacing,
                free_share=max(0.0, 1.0 - self.balloon.used / self.quota),
                longest_step=self.pace_estimator.longest_step,
                step=self._pace.step,
            )
            if begin <= now:
                break
            wait_for_input(self.input_queue, between(now, begin), self._is_pass_over)
            self.process_inputs()
            now = Instant(self.clock())
            if self._is_pass_over():
                break
        return between(began, now)

    def _read_device_contention(self) -> bool:
        """Whether an embedding pass was under way at any time since the last call."""
        if (state := self._shared_state) is None:
            return False
        was_under_way, begun = self._is_pass_under_way, self._passes_begun
        self._passes_begun, self._is_pass_under_way = state.passes_begun, state.is_device_shared
        return was_under_way or self._is_pass_under_way or begun != self._passes_begun

    def _is_pass_over(self) -> bool:
        return self._shared_state is None or not self._shared_state.is_device_shared

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes that a step has finished; vLLM processes its output."""
        if scheduler_output.num_scheduled_tokens:
            self._finished_steps.append(self._steps_in_flight.popleft())
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def _observe_step(self, now: Instant, waited: Duration, *, is_alone: bool) -> None:
        """Attributes the time since the previous `schedule()` to the step that finished in between.

        Under asynchronous scheduling that is the step that was in flight then, else the step planned then.
        """
        # Without running requests the engine may have been idle in between.
        if self._previous_schedule is not None and self.running and len(self._finished_steps) == 1:
            took = Duration(now - self._previous_schedule - waited)
            self._observe(self._finished_steps[0], took, is_alone=is_alone)
        self._finished_steps.clear()

    def set_step_cost(self, cost: StepCost | None) -> None:
        """Sets the prior of the step-time model, which applies until enough steps were measured."""
        self.pace_estimator = ObservedPace(prior=cost)
        self._pace = self.pace_estimator.pace or UNKNOWN_PACE

    def _observe(self, work: StepWork, took: Duration, *, is_alone: bool) -> None:
        self.pace_estimator.observe_work(work, took, is_alone=is_alone)
        self._pace = self.pace_estimator.pace or UNKNOWN_PACE

    def _stamp(self, now: Instant) -> None:
        self._tracker.stamp(self.running, now, is_in_flight=bool(self._steps_in_flight))

    def view(self, now: Instant) -> EngineView:
        """The engine's state as the policy sees it; records new tokens first."""
        self._stamp(now)
        return EngineView(
            now=now,
            pace=self._pace,
            block_tokens=self.block_size,
            quota=self.quota,
            used=self.balloon.used,
            growth=self._tracker.growth(self.max_num_scheduled_tokens),
            free_slots=max_running_requests(self.scheduler_config) - len(self.running),
            running=self._tracker.batch,
            has_packed=self.has_packed,
            has_shared=bool(self._sharing),
            use_ceiling=self.use_ceiling,
        )

    def _plan(self, now: Instant) -> None:
        self.balloon.withhold_beyond(self.use_ceiling)
        if self._sharing is not None:
            self._sharing.waiting.refresh()
        view = self.view(now)
        plan = self.engine_policy.plan(view)
        offer = view.admitted(plan)
        for victim, beneficiary in plan.preemptions():
            self.preempt(self.requests[victim.request.id], beneficiary)
        if plan.preempt:
            self.balloon.withhold_beyond(self.use_ceiling)
        if plan.ranked:
            self._rank([self.requests[state.request.id] for state in plan.ranked[-RANKED:]])
        self.waiting.open([self.requests[state.request.id] for state in offer])

    def _rank(self, order: list[Any]) -> None:
        for request in self._preemption_order:
            request.priority = 0
        for at, request in enumerate(order, start=1):
            request.priority = at
        self._preemption_order = order

    def preempt(self, request: Any, beneficiary: Any = None) -> None:
        """Preempts a running request by recompute: it loses its blocks and may restart in the next step."""
        del self.running[self._tracker.index_of(self.running, request.tandem)]
        self.preemptions.beneficiary = beneficiary
        # As vLLM's own preemption: a connector must not hand over blocks that are freed here.
        drops = getattr(self, "requires_kv_delivery", False)
        self._preempt_request(request, time.monotonic(), **({"drop_stale_output": True} if drops else {}))

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.preemptions.add(request, self.clock())
        request.tandem.preemptions += 1
        self._tracker.remove(request.tandem)
        super()._preempt_request(request, *args, **kwargs)

    # --- requests ----------------------------------------------------------------------------

    def _on_enqueue(self, request: Any) -> None:
        now = Instant(self.clock())
        if not hasattr(request, "tandem"):
            request.tandem = self._intake.admit(request, now)
            # The client's priority is in `tandem`; this field is the preemption rank.
            request.priority = 0
        stamp(request, now)
        if self._sharing is not None:
            self._sharing.waiting.enqueue(request)
        self.engine_policy.enqueue(request.tandem)

    @property
    def malformed(self) -> int:
        """Requests whose metadata could not be read."""
        return self._intake.malformed

    def _on_dequeue(self, request: Any) -> None:
        self.engine_policy.dequeue(request.tandem)
        if self._sharing is not None:
            self._sharing.waiting.dequeue(request)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        # vLLM calls this once for every request that ends, possibly while it still waits.
        self.waiting.remove_requests([request])
        if hasattr(request, "tandem"):
            self._tracker.remove(request.tandem)
            self._intake.remove(request.tandem)
            del request.tandem
        return super()._free_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Deflates the balloon for the reset, because vLLM refuses it while any block is in use."""
        self.balloon.withhold_beyond(self.balloon.total)
        try:
            done: bool = super().reset_prefix_cache(*args, **kwargs)
        finally:
            self.balloon.withhold_beyond(self.use_ceiling)
        return done

    # --- control and state -------------------------------------------------------------------

    def set_quota(self, blocks: int, use_ceiling: int | None = None) -> None:
        """Sets the quota from the next step on, and what running requests may use (None: the quota).

        Raises ValueError unless 1 <= quota <= use ceiling <= pool.
        """
        ceiling = blocks if use_ceiling is None else use_ceiling
        if not 1 <= blocks <= ceiling <= self.balloon.total:
            raise ValueError(
                f"quota={blocks} blocks with use_ceiling={ceiling}: must be between 1 and the pool's "
                f"{self.balloon.total}, the quota at most the ceiling; a larger pool needs a restart of vLLM"
            )
        self.quota, self.use_ceiling = blocks, ceiling

    def sync_idle(self) -> None:
        """Applies the quota and publishes the state; call only while no step is in flight."""
        self.balloon.withhold_beyond(self.use_ceiling)
        self._previous_used = self.balloon.used
        self._publish(Instant(self.clock()))

    def _publish(self, now: Instant) -> None:
        if (state := self._shared_state) is not None:
            state.write(self.facts(now), *self._tracker.rows(self.running), self.preemptions.packed)

    def set_options(self, changes: Mapping[str, Any]) -> None:
        """Builds a new policy and moves the waiting requests to it. Raises ValueError."""
        options = self.options.changed(changes)
        self.engine_policy, self.options = engine_policy(options), options
        for request in self.waiting:
            self.engine_policy.enqueue(request.tandem)

    def set_forecast(self, name: str, forecast: LengthForecast) -> None:
        """Updates the length forecast of all samples of the sender's request `name`, if it is still here."""
        for state in self._intake.samples(name):
            is_waiting = self.waiting.holds(state.request.id)
            if is_waiting:
                self.engine_policy.dequeue(state)
            state.set_forecast(forecast)
            self._tracker.set_forecast(state)
            if is_waiting:
                self.engine_policy.enqueue(state)

    def facts(self, now: Instant) -> EngineFacts:
        """The counters that the shared state publishes."""
        used = self.balloon.used
        return EngineFacts(
            at_ns=now,
            step=self.steps,
            step_ns=self._pace.step,
            prompt_token_ns=self._pace.per_prompt_token,
            total=self.balloon.total,
            quota=self.quota,
            use_ceiling=self.use_ceiling,
            used=used,
            # A step in flight may still write to blocks that its requests have just freed.
            ceded=self.balloon.total - max(self.use_ceiling, used, self._previous_used),
            running=len(self.running),
            waiting=len(self.waiting),
            preemptions=self.preemptions.count,
            recompute_tokens=self.preemptions.tokens,
            waited_ns=self.waited_ns,
        )


def _no_input() -> None:
    """Does nothing; used as the input reader of an engine without an input queue."""


def _parse_config(config: Mapping[str, Any]) -> tuple[EngineOptions, Defaults]:
    options = {key: value for key, value in config.items() if key != "default"}
    return EngineOptions().changed(options), defaults_of(config.get("default", {}))


class TandemScheduler(TandemScheduling, Scheduler):  # type: ignore[misc]
    """Tandem's scheduler for synchronous scheduling."""


class AsyncTandemScheduler(TandemScheduling, AsyncScheduler):  # type: ignore[misc]
    """Tandem's scheduler for asynchronous scheduling, which plans a step while the previous one runs."""


def make(vllm_config: Any, **kwargs: Any) -> TandemScheduling:
    """Factory named by `scheduler_cls`; picks the class that fits vLLM's scheduling mode.

    A fixed subclass of the synchronous scheduler would disable asynchronous scheduling.
    """
    rpc.install()
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler_class = AsyncTandemScheduler if is_async else TandemScheduler
    scheduler: TandemScheduling = scheduler_class(vllm_config=vllm_config, **kwargs)
    return scheduler
