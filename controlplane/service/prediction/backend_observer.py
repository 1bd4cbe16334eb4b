"""Feeds the step and pass times that the backends report to the pace estimators and the metrics."""

from collections.abc import Callable, Mapping
from functools import partial

from controlplane.core.clock import Clock, Duration, seconds, to_seconds
from controlplane.core.engine_reports import EngineStep
from controlplane.core.ports import Embedder, EmbeddingPass, Generator, PauseCost
from controlplane.core.request import Owner
from controlplane.metrics import Metrics
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.prediction.device_time import DeviceTime
from controlplane.service.prediction.fail_open import FailOpen, Subject
from predictors.timing.online_step_time import StepWork
from predictors.timing.pace_estimators import PaceEstimators


class BackendObserver:
    """Observes every engine step and embedding pass, and gives each embedder the price of a pause.

    An exception in a pace estimator never reaches a backend, where it would end the engine.
    """

    def __init__(
        self,
        clock: Clock,
        pace_estimators: PaceEstimators,
        pause_cost: Callable[[], PauseCost | None],
        encoders: EncoderRegistry,
        metrics: Metrics,
        fail_open: FailOpen,
    ) -> None:
        self._clock = clock
        self._device_time = DeviceTime()
        self._pace_estimators = pace_estimators
        self._pause_cost = pause_cost
        self._encoders = encoders
        self._metrics = metrics
        self._guard = fail_open[Subject.PACE]
        self.on_pass: list[Callable[[Embedder, EmbeddingPass], None]] = []
        self._has_pass_ended = False

    def attach(self, generators: Mapping[str, Generator]) -> None:
        """Has the backends call this observer."""
        for generator in generators.values():
            generator.on_step = self._observe_step
        for embedder in self._encoders.values():
            self._attach(embedder)
        self._encoders.on_added.append(self._added)

    def _attach(self, embedder: Embedder) -> None:
        embedder.on_pass = partial(self._observe_pass, embedder)
        embedder.pause_cost = self._priced_pause

    def _priced_pause(self) -> PauseCost | None:
        with self._guard:
            return self._pause_cost()
        return None

    def _added(self, embedder: Embedder) -> None:
        self._attach(embedder)
        with self._guard:
            self._pace_estimators.embedding.add(embedder)

    def _observe_step(self, done: EngineStep) -> None:
        with self._guard:
            work = StepWork(done.prefill_tokens, done.decodes, done.cells)
            # A pass may have ended during the step, before the step is reported.
            is_shared = self._has_pass_ended or any(e.is_computing for e in self._encoders.running)
            self._has_pass_ended = False
            estimator = self._pace_estimators.llm
            busy = Duration(done.took - done.waited)
            # An embedding pass makes a step longer; the difference is counted as time of the embeddings.
            alone = Duration(min(busy, seconds(estimator.steps.predict(work)))) if is_shared else busy
            self._count(Owner.LLM, done.took, alone)
            estimator.observe_work(work, done.took, waited=done.waited, is_alone=not is_shared)

    def _count(self, owner: Owner, took: Duration, alone: Duration) -> None:
        counted = self._device_time.count(owner, self._clock.now(), took, alone)
        self._metrics.device_time[owner] += to_seconds(counted)

    @staticmethod
    def _alone(embedder: Embedder, done: EmbeddingPass) -> Duration:
        """The time of a pass without the delay by engine steps."""
        inputs = max(1, done.inputs)
        expected = embedder.batch_time([done.tokens // inputs] * inputs)
        return min(done.elapsed, expected) if expected else done.elapsed

    def _observe_pass(self, embedder: Embedder, done: EmbeddingPass) -> None:
        self._has_pass_ended = True
        with self._guard:
            self._metrics.batch_tokens.observe(done.padded_tokens)
            self._count(Owner.EMBEDDING, done.elapsed, self._alone(embedder, done))
            self._metrics.handover_time += to_seconds(done.handover)
            # A leaving worker teaches only the pace of all models together, not that of its model.
            model = embedder.model if self._encoders.get(embedder.model) is embedder else None
            self._pace_estimators.embedding.observe_pass(
                done.tokens, done.elapsed, model=model, ended=self._clock.now()
            )
            if done.priced is not None:
                self._pace_estimators.llm.observe_pass(done.priced)
            for listener in self.on_pass:
                listener(embedder, done)
