"""Feeds the step and pass times that the backends report to the rate models."""

from collections.abc import Callable, Mapping
from functools import partial

from controlplane.core.clock import NO_TIME, Duration, to_seconds
from controlplane.core.engine_reports import EngineStep
from controlplane.core.ports import Embedder, EmbeddingPass, Generator, PassLimit
from controlplane.core.request import Owner
from controlplane.metrics import Metrics
from controlplane.service.prediction.fail_open import FailOpen, Subject
from predictors.timing.online_step_time import ObservedPace, ReportedPace, StepWork


class RateObserver:
    """Observes every engine step and embedding pass, and limits each batch to `decode_slack`.

    The limit that was in force is stored with the next step, whose time depends on it. An exception in a rate
    model never reaches a backend, where it would end the engine.
    """

    def __init__(
        self,
        paces: Mapping[Owner, ObservedPace | ReportedPace],
        decode_slack: Callable[[], PassLimit | None],
        embedders: Mapping[str, Embedder],
        metrics: Metrics,
        fail_open: FailOpen,
    ) -> None:
        self._paces = paces
        self._decode_slack = decode_slack
        self._embedders = embedders
        self._metrics = metrics
        self._fail_open = fail_open
        self.on_pass: Callable[[Embedder, EmbeddingPass], None] | None = None
        # An embedder that yields the CPU to the LLM never calls `_batch_time_limit`.
        self._ceded: Duration | None = NO_TIME
        self._has_pass_ended = False

    def attach(self, generators: Mapping[str, Generator]) -> None:
        """Has the backends call this observer."""
        for generator in generators.values():
            generator.on_step = self._observe_step
        for embedder in self._embedders.values():
            embedder.on_pass = partial(self._observe_pass, embedder.model)
            embedder.batch_limit = self._batch_time_limit

    def _batch_time_limit(self) -> PassLimit | None:
        """Longest time that an embedding batch may occupy the device now; None if unlimited."""
        limit = self._decode_slack()
        # What a pass takes beyond the slack is lost to decoding.
        self._ceded = None if limit is None else limit.slack
        return limit

    def _observe_step(self, done: EngineStep) -> None:
        with self._fail_open[Subject.PACE]:
            work = StepWork(done.prefill_tokens, done.decodes, done.cells)
            # A pass may have ended during the step, before the step is reported.
            is_shared = self._has_pass_ended or any(e.is_computing for e in self._embedders.values())
            self._has_pass_ended = False
            paces = self._paces[Owner.LLM]
            busy = to_seconds(Duration(done.took - done.waited))
            # A step beside an embedding pass is longer; the difference is the time of the embeddings.
            own = min(busy, paces.steps.predict(work)) if is_shared else busy
            self._metrics.device_time[Owner.LLM] += own
            paces.observe_work(work, done.took, waited=done.waited, is_alone=not is_shared, ceded=self._ceded)

    def _alone(self, model: str, done: EmbeddingPass) -> Duration:
        """The time of a pass without what engine steps beside it add."""
        inputs = max(1, done.inputs)
        expected = self._embedders[model].batch_time([done.tokens // inputs] * inputs)
        return min(done.elapsed, expected) if expected else done.elapsed

    def _observe_pass(self, model: str, done: EmbeddingPass) -> None:
        self._has_pass_ended = True
        with self._fail_open[Subject.PACE]:
            self._metrics.batch_tokens.observe(done.padded_tokens)
            self._metrics.device_time[Owner.EMBEDDING] += to_seconds(self._alone(model, done))
            paces = self._paces[Owner.EMBEDDING]
            paces.observe_prefill(done.tokens, done.elapsed, model=model)
            if self.on_pass is not None:
                self.on_pass(self._embedders[model], done)
