"""How would the policies of the engine plug-in order the simulated engine's steps? Same code, another host.

The host keeps a `RequestState` for each request, stamps it with the step's time, and applies the plan: who
leaves, who may join in order, and who gives way first if memory runs short after all.
"""

from collections import deque

from backends.simulated.scheduler import SimulatedScheduler
from benchmark_control_plane.round_model.step_simulator import StepObjective, SteppedRequest
from controlplane.core.clock import Instant, seconds
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.core.view import Pace
from controlplane.policy.engine.interface import EnginePolicy, EngineView
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch


class EnginePolicyRule:
    """`blocks` are the engine's; `pace` is what a step and a prompt token usually take."""

    def __init__(
        self, policy: EnginePolicy, objective: StepObjective, *, blocks: int, context: int, pace: Pace
    ) -> None:
        self._policy = policy
        self._class = ServiceClass("all", Slo(ttft=seconds(objective.ttft)), 0, sheddable=False)
        self._gap = seconds(objective.gap)
        self._blocks = blocks
        self._context = context
        self._pace = pace
        self._new: list[SteppedRequest] = []
        self._waiting: dict[str, SteppedRequest] = {}
        self._progress: dict[int, RequestState] = {}

    def arrive(self, one: SteppedRequest) -> None:
        request = Request(
            id=f"{one.number:09d}",
            kind=Kind.GENERATE,
            model="simulated",
            tenant="simulation",
            service_class=self._class,
            slo=self._class.slo,
            arrival=Instant(seconds(one.arrival)),
            prompt_tokens=one.prompt,
            max_output_tokens=self._context - one.prompt,
        )
        self._progress[one.number] = RequestState(request, one.predicted, name=request.id, gap=self._gap)
        self._new.append(one)

    def arrange(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        at = Instant(seconds(now))
        self._note_moves(engine, at)
        view = self._view(engine, at)
        plan = self._policy.plan(view)
        by_id = {self._progress[one.number].request.id: one for one in engine.running}
        for progress in plan.preempt:
            engine.preempt(by_id[progress.request.id])
        preempted = list(engine.waiting)
        offered = [self._waiting[progress.request.id] for progress in plan.offer]
        for one in reversed(preempted):
            self._joins_queue(one, at)
        places = {progress.request.id: place for place, progress in enumerate(plan.ranked)}
        engine.running.sort(key=lambda one: places.get(self._progress[one.number].request.id, -1))
        engine.waiting = deque(offered)

    def _note_moves(self, engine: SimulatedScheduler[SteppedRequest], at: Instant) -> None:
        """What the last step did: tokens, starts, preemptions by the engine itself."""
        for one in engine.running:
            progress = self._progress[one.number]
            # First it leaves the queue, then it grows: the policy finds it there by its size.
            if progress.request.id in self._waiting:
                del self._waiting[progress.request.id]
                self._policy.dequeue(progress)
            if one.produced > progress.done and one.last is not None:
                progress.stamp(Instant(seconds(one.last)), one.produced - progress.done)
        for one in engine.waiting:
            if self._progress[one.number].request.id not in self._waiting:
                self._joins_queue(one, at)
        engine.waiting.clear()
        for one in self._new:
            self._joins_queue(one, at)
        self._new.clear()

    def _joins_queue(self, one: SteppedRequest, at: Instant) -> None:
        progress = self._progress[one.number]
        progress.preemptions = one.preemptions
        self._waiting[progress.request.id] = one
        self._policy.enqueue(progress, at)

    def _view(self, engine: SimulatedScheduler[SteppedRequest], at: Instant) -> EngineView:
        running = engine.running
        listed = [self._progress[one.number] for one in running]
        for one, progress in zip(running, listed, strict=True):
            progress.held = one.blocks
        block = engine.block_tokens
        return EngineView(
            now=at,
            pace=self._pace,
            block_tokens=block,
            quota=self._blocks,
            used=sum(one.blocks for one in running),
            growth=sum(-(-one.total // block) - one.blocks for one in running),
            free_slots=engine.max_running - len(running),
            running=RunningBatch(listed),
        )

    def finish(self, one: SteppedRequest) -> None:
        progress = self._progress.pop(one.number)
        if progress.request.id in self._waiting:
            del self._waiting[progress.request.id]
            self._policy.dequeue(progress)
