"""Runs a policy of the engine plug-in on the simulated engine.

The same policy code runs inside vLLM. Here the host keeps one `RequestState` per request, updates it with the
time of each step, and applies the plan: preempted requests leave, offered requests may join in order, and the
ranks determine which request is preempted if memory runs short afterwards.
"""

from collections import deque

from backends.simulated.continuous_batching import SimulatedScheduler
from benchmark_control_plane.round_model.step_simulator import StepObjective, SteppedRequest
from controlplane.core.clock import Instant, seconds
from controlplane.core.pool_view import Pace
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.engine.interface import EnginePolicy, EngineView
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch


class EnginePolicyRule:
    """A step rule that applies the plans of an `EnginePolicy`.

    `blocks` is the size of the engine's pool, `context` its longest sequence in tokens, `pace` the usual time
    of a step and of a prompt token.
    """

    def __init__(
        self, policy: EnginePolicy, objective: StepObjective, *, blocks: int, context: int, pace: Pace
    ) -> None:
        self._policy = policy
        slo = Slo(ttft=seconds(objective.ttft), gap=seconds(objective.gap))
        self._class = ServiceClass("all", slo, 0, sheddable=False)
        self._blocks = blocks
        self._context = context
        self._pace = pace
        self._new: list[SteppedRequest] = []
        self._waiting: dict[str, SteppedRequest] = {}
        self._states: dict[int, RequestState] = {}

    def arrive(self, simulated: SteppedRequest) -> None:
        request = Request(
            id=f"{simulated.number:09d}",
            kind=Kind.GENERATE,
            model="simulated",
            tenant="simulation",
            service_class=self._class,
            slo=self._class.slo,
            arrival=Instant(seconds(simulated.arrival)),
            prompt_tokens=simulated.prompt,
            max_output_tokens=self._context - simulated.prompt,
        )
        self._states[simulated.number] = RequestState(request, simulated.predicted)
        self._new.append(simulated)

    def arrange(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        at = Instant(seconds(now))
        self._sync_states(engine)
        view = self._view(engine, at)
        plan = self._policy.plan(view)
        by_id = {self._states[simulated.number].request.id: simulated for simulated in engine.running}
        for state in plan.preempt:
            engine.preempt(by_id[state.request.id])
        preempted = list(engine.waiting)
        offered = [self._waiting[state.request.id] for state in plan.offer]
        for simulated in reversed(preempted):
            self._enqueue(simulated)
        places = {state.request.id: place for place, state in enumerate(plan.ranked)}
        engine.running.sort(key=lambda simulated: places.get(self._states[simulated.number].request.id, -1))
        engine.waiting = deque(offered)

    def _sync_states(self, engine: SimulatedScheduler[SteppedRequest]) -> None:
        """Copies the last step's tokens, starts and preemptions by the engine into the states."""
        for simulated in engine.running:
            state = self._states[simulated.number]
            # Dequeue before the state grows: the policy finds it in its queue by its size.
            if state.request.id in self._waiting:
                del self._waiting[state.request.id]
                self._policy.dequeue(state)
            if simulated.produced > state.done and simulated.last is not None:
                state.stamp(Instant(seconds(simulated.last)), simulated.produced - state.done)
        for simulated in engine.waiting:
            if self._states[simulated.number].request.id not in self._waiting:
                self._enqueue(simulated)
        engine.waiting.clear()
        for simulated in self._new:
            self._enqueue(simulated)
        self._new.clear()

    def _enqueue(self, simulated: SteppedRequest) -> None:
        state = self._states[simulated.number]
        state.preemptions = simulated.preemptions
        self._waiting[state.request.id] = simulated
        self._policy.enqueue(state)

    def _view(self, engine: SimulatedScheduler[SteppedRequest], at: Instant) -> EngineView:
        running = engine.running
        states = [self._states[simulated.number] for simulated in running]
        for simulated, state in zip(running, states, strict=True):
            state.held = simulated.blocks
        block = engine.block_tokens
        return EngineView(
            now=at,
            pace=self._pace,
            block_tokens=block,
            quota=self._blocks,
            used=sum(simulated.blocks for simulated in running),
            growth=sum(-(-simulated.total // block) - simulated.blocks for simulated in running),
            free_slots=engine.max_running - len(running),
            running=RunningBatch(states),
        )

    def finish(self, simulated: SteppedRequest) -> None:
        state = self._states.pop(simulated.number)
        if state.request.id in self._waiting:
            del self._waiting[state.request.id]
            self._policy.dequeue(state)
