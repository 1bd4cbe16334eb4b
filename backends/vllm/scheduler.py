"""Who runs in vLLM's next step? Tandem's policies inside EngineCore, around vLLM's own `schedule()`.

    vllm serve MODEL --scheduler-cls backends.vllm.scheduler.make

Before each step: while somebody else wants the device, the part of the promised time that nobody misses is
left to it (`decode_pace`); tokens that appeared are stamped, the quota is enforced (`balloon`), the policy
says who gives way and who may start, and vLLM then schedules as ever, seeing only what was offered
(`offer_queue`). Should blocks run short all the same, vLLM preempts whom the policy ranked last: it
evicts the largest `priority`, which no one else reads. Nothing of `schedule()` is copied. What we know of a
request hangs on vLLM's own object, as `tandem`: to look it up by name in every step takes longer.

Options come from `additional_config["tandem"]` (see `EngineOptions`, and `default` for requests that
say nothing); all can be changed while the engine runs (`control`). Importing this module imports vLLM.
"""

import logging
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
from backends.vllm.plugin.batch_view import BatchTracker, stamp
from backends.vllm.plugin.input_wait import wait_for_input
from backends.vllm.plugin.offer_queue import OfferQueue
from backends.vllm.plugin.request_metadata import (
    Defaults,
    EngineRequest,
    defaults_of,
    extract_metadata,
    make_engine_request,
)
from backends.vllm.plugin.shared_state import EngineFacts, SharedState
from controlplane.core.clock import Duration, Instant, between
from controlplane.core.forecast import LengthForecast
from controlplane.core.ports import StepCost
from controlplane.core.view import Pace
from controlplane.policy.engine.decode_pacing import next_step_start
from controlplane.policy.engine.interface import RANKED, EnginePolicy, EngineView
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.registry import engine_policy
from predictors.timing.step_time import ObservedPace, StepWork

log = logging.getLogger(__name__)

_UNKNOWN_RATE = Pace(Duration(0), Duration(0))


if TYPE_CHECKING:
    _Base = Scheduler
else:
    _Base = object


class TandemScheduling(_Base):  # type: ignore[misc, valid-type]
    """Mixed in before one of vLLM's schedulers."""

    has_packed = False
    """Whether blocks may hold more tokens of some requests than of others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = (self.vllm_config.additional_config or {}).get("tandem", {})
        self.options, self.defaults = _parse_config(config)
        self.engine_policy: EnginePolicy = engine_policy(self.options)
        self.clock: Callable[[], int] = time.monotonic_ns
        self.balloon = balloon_of(self.kv_cache_manager.block_pool)
        self.quota: int = self.balloon.total
        self.preempted = 0
        self.recompute_tokens = 0
        self.waited_ns = 0
        self.malformed = 0
        self.steps = 0
        self.hook_ns = 0
        self.set_step_cost(None)
        self.input_queue: Queue[Any] | None = None
        self.process_inputs: Callable[[], None] = _no_input
        self._shared_state = SharedState.from_environment()
        has_drafts = self.num_spec_tokens > 0
        self._batch = BatchTracker(
            self.block_size,
            has_packed=self.has_packed,
            runs_ahead=has_drafts or isinstance(self, AsyncScheduler),
            takes_back=has_drafts or self.connector is not None,
        )
        self._by_client_id: dict[str, list[EngineRequest]] = {}
        self._previous_schedule: Instant | None = None
        self._previous_step_start: Instant | None = None
        self._steps_in_flight: deque[StepWork] = deque()
        self._finished_steps: list[StepWork] = []
        self._is_device_shared = False
        self._previous_used = 0
        self._preemption_order: list[Any] = []
        # vLLM then evicts the largest `priority`; its own queue of that kind is replaced.
        self.policy = SchedulingPolicy.PRIORITY
        self.waiting = OfferQueue(self._on_enqueue, self._on_dequeue)

    # --- one step ----------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        was_shared, self._is_device_shared = (
            self._is_device_shared,
            self._shared_state is not None and self._shared_state.is_device_shared,
        )
        waited = self._delay_step()
        self.waited_ns += waited
        began = time.perf_counter_ns()
        now = Instant(self.clock())
        self._observe_step(now, waited, is_alone=not (was_shared or self._is_device_shared))
        self._plan(now)
        self.steps += 1
        self.hook_ns = time.perf_counter_ns() - began
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.waiting.close()
        began = time.perf_counter_ns()
        scheduled = output.num_scheduled_tokens
        prefill = output.total_num_scheduled_tokens - len(scheduled)
        work = StepWork(prefill, len(scheduled), self.balloon.used * self.block_size)
        if scheduled:
            self._steps_in_flight.append(work)
        self._previous_schedule, self._previous_step_start = now, now if scheduled else None
        self._batch.record_step(self.running, scheduled, output.total_num_scheduled_tokens)
        self._publish(now)
        self._previous_used = self.balloon.used
        self.hook_ns += time.perf_counter_ns() - began
        return output

    def _delay_step(self) -> Duration:
        """Leaves the device to who else wants it as long as nobody misses anything. Returns how long."""
        if not self._is_device_shared or self._previous_step_start is None or len(self.waiting):
            return Duration(0)
        last, now = self._previous_step_start, Instant(self.clock())
        began = now
        self._stamp(now)
        # What arrives is taken in here: a newcomer is in the step that it ended the wait for.
        while not len(self.waiting):
            begin = next_step_start(self._batch.batch, last, now, self.options.decode_pace)
            if begin <= now:
                break
            wait_for_input(self.input_queue, between(now, begin))
            self.process_inputs()
            now = Instant(self.clock())
        return between(began, now)

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.num_scheduled_tokens:
            self._finished_steps.append(self._steps_in_flight.popleft())
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def _observe_step(self, now: Instant, waited: Duration, *, is_alone: bool) -> None:
        """What has ended since the last look took that long: the step planned then or, where one was in
        flight, that one."""
        # Without anyone running the engine may have rested since.
        if self._previous_schedule is not None and self.running and len(self._finished_steps) == 1:
            self._observe(
                self._finished_steps[0], Duration(now - self._previous_schedule - waited), is_alone=is_alone
            )
        self._finished_steps.clear()

    def set_step_cost(self, cost: StepCost | None) -> None:
        """Of steps, until enough were seen."""
        self.observed = ObservedPace(prior=cost)
        self._pace = self.observed.pace or _UNKNOWN_RATE

    def _observe(self, work: StepWork, took: Duration, *, is_alone: bool) -> None:
        self.observed.observe_work(work, took, is_alone=is_alone)
        self._pace = self.observed.pace or _UNKNOWN_RATE

    def _stamp(self, now: Instant) -> None:
        self._batch.stamp(self.running, now, is_in_flight=bool(self._steps_in_flight))

    def view(self, now: Instant) -> EngineView:
        self._stamp(now)
        return EngineView(
            now=now,
            pace=self._pace,
            block_tokens=self.block_size,
            quota=self.quota,
            used=self.balloon.used,
            growth=self._batch.growth(self.max_num_scheduled_tokens),
            free_slots=max_running_requests(self.scheduler_config) - len(self.running),
            running=self._batch.batch,
            has_packed=self.has_packed,
        )

    def _plan(self, now: Instant) -> None:
        self.balloon.withhold_beyond(self.quota)
        plan = self.engine_policy.plan(self.view(now))
        for victim in plan.preempt:
            self.preempt(self.requests[victim.request.id])
        if plan.preempt:
            self.balloon.withhold_beyond(self.quota)
        if plan.ranked:
            self._rank([self.requests[progress.request.id] for progress in plan.ranked[-RANKED:]])
        self.waiting.open([self.requests[progress.request.id] for progress in plan.offer])

    def _rank(self, next_to_go: list[Any]) -> None:
        for request in self._preemption_order:
            request.priority = 0
        for at, request in enumerate(next_to_go, start=1):
            request.priority = at
        self._preemption_order = next_to_go

    def preempt(self, request: Any) -> None:
        """It loses its blocks and waits again, from the next step on at the earliest."""
        del self.running[self._batch.index_of(self.running, request.tandem)]
        self._preempt_request(request, time.monotonic())

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.preempted += 1
        self.recompute_tokens += request.num_computed_tokens
        request.tandem.preemptions += 1
        self._batch.remove(request.tandem)
        super()._preempt_request(request, *args, **kwargs)

    # --- who is there ------------------------------------------------------------------------

    def _on_enqueue(self, request: Any) -> None:
        now = Instant(self.clock())
        if not hasattr(request, "tandem"):
            request.tandem = self._engine_request(request, now)
            self._by_client_id.setdefault(request.tandem.name, []).append(request.tandem)
            # What the client asked for is in its progress.
            request.priority = 0
        stamp(request, now)
        self.engine_policy.enqueue(request.tandem, now)

    def _on_dequeue(self, request: Any) -> None:
        self.engine_policy.dequeue(request.tandem)

    def _engine_request(self, request: Any, now: Instant) -> EngineRequest:
        facts = {"request_id": request.request_id, "prompt_tokens": request.num_prompt_tokens}
        params = request.sampling_params or request.pooling_params
        limit = request.max_tokens or 1
        try:
            said = extract_metadata(getattr(params, "extra_args", None))
            return make_engine_request(said, self.defaults, max_tokens=limit, now=now, **facts)
        except ValueError as error:
            # It was accepted; an engine that died of one caller's mistake would serve nobody.
            self.malformed += 1
            log.warning("request %s is served as default class: %s", request.request_id, error)
            return make_engine_request({}, self.defaults, max_tokens=limit, now=now, **facts)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        # The last of a request; all ways out of vLLM's scheduler lead here, some before it left the queue.
        self.waiting.remove_requests([request])
        if hasattr(request, "tandem"):
            self._batch.remove(request.tandem)
            self._drop_client_id(request.tandem)
            del request.tandem
        return super()._free_request(request, *args, **kwargs)

    def _drop_client_id(self, progress: EngineRequest) -> None:
        siblings = self._by_client_id[progress.name]
        siblings.remove(progress)
        if not siblings:
            del self._by_client_id[progress.name]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """vLLM refuses while any block is in use, and the balloon's blocks are."""
        self.balloon.withhold_beyond(self.balloon.total)
        try:
            done: bool = super().reset_prefix_cache(*args, **kwargs)
        finally:
            self.balloon.withhold_beyond(self.quota)
        return done

    # --- control and state -------------------------------------------------------------------

    def set_quota(self, blocks: int) -> None:
        """In force from the next step on. Raises ValueError for less than one block or more than all."""
        if not 1 <= blocks <= self.balloon.total:
            raise ValueError(
                f"quota={blocks} blocks: between 1 and the pool's {self.balloon.total}; "
                "a larger pool needs a restart of vLLM"
            )
        self.quota = blocks

    def sync_idle(self) -> None:
        """Between steps, none in flight: the quota takes hold, and what nobody has is nobody's."""
        self.balloon.withhold_beyond(self.quota)
        self._previous_used = self.balloon.used
        self._publish(Instant(self.clock()))

    def _publish(self, now: Instant) -> None:
        if self._shared_state is not None:
            self._shared_state.write(self.facts(now), *self._batch.rows(self.running))

    def set_options(self, changes: Mapping[str, Any]) -> None:
        """What waits is handed over to a newly built policy. Raises ValueError."""
        options = self.options.changed(changes)
        self.engine_policy, self.options = engine_policy(options), options
        now = Instant(self.clock())
        for request in self.waiting:
            self.engine_policy.enqueue(request.tandem, now)

    def set_forecast(self, name: str, forecast: LengthForecast) -> None:
        """A better prediction of the whole answer, for all samples of the request that its caller calls
        `name`. Does nothing if it has left."""
        for progress in self._by_client_id.get(name, ()):
            is_waiting = self.waiting.holds(progress.request.id)
            if is_waiting:
                self.engine_policy.dequeue(progress)
            progress.set_forecast(forecast)
            self._batch.set_forecast(progress)
            if is_waiting:
                self.engine_policy.enqueue(progress, Instant(self.clock()))

    def facts(self, now: Instant) -> EngineFacts:
        used = self.balloon.used
        return EngineFacts(
            at_ns=now,
            step=self.steps,
            step_ns=self._pace.step,
            prompt_token_ns=self._pace.per_prompt_token,
            total=self.balloon.total,
            quota=self.quota,
            used=used,
            # A step in flight may still write what its request has just given back.
            ceded=self.balloon.total - max(self.quota, used, self._previous_used),
            running=len(self.running),
            waiting=len(self.waiting),
            preemptions=self.preempted,
            recompute_tokens=self.recompute_tokens,
            waited_ns=self.waited_ns,
        )


def _no_input() -> None:
    """Nothing arrives at an engine that is called rather than told."""


def _parse_config(config: Mapping[str, Any]) -> tuple[EngineOptions, Defaults]:
    options = {key: value for key, value in config.items() if key != "default"}
    return EngineOptions().changed(options), defaults_of(config.get("default", {}))


class TandemScheduler(TandemScheduling, Scheduler):  # type: ignore[misc]
    """For engines that wait for each step."""


class AsyncTandemScheduler(TandemScheduling, AsyncScheduler):  # type: ignore[misc]
    """For engines that schedule a step while the last one runs."""


def make(vllm_config: Any, **kwargs: Any) -> TandemScheduling:
    """What `scheduler_cls` names: a plain subclass under asynchronous scheduling would lose the overlap."""
    rpc.install()
    is_async = vllm_config.scheduler_config.async_scheduling
    kind = AsyncTandemScheduler if is_async else TandemScheduler
    made: TandemScheduling = kind(vllm_config=vllm_config, **kwargs)
    return made
