"""The service object: starts and stops backends, timers and monitor; checks and drains."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from controlplane.config import Config
from controlplane.config.documents import document_of, masked
from controlplane.core.clock import Instant, between, milliseconds
from controlplane.core.decision import Reject
from controlplane.core.errors import BackendDown
from controlplane.core.slo import ServiceClass
from controlplane.metrics import Metrics
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.gate.gate import Gate
from controlplane.service.gate.intake import Intake
from controlplane.service.gate.load_reporter import LoadReporter, require_small_reports
from controlplane.service.live_feed import LiveFeed, ShownVersion
from controlplane.service.memory.monitor import MemoryMonitor
from controlplane.service.memory.quota_controller import QuotaController
from controlplane.service.prediction.length_training import LengthTraining
from controlplane.service.reconfiguration import ConfiguredParts, ConfigVersion, Reconfiguration
from controlplane.service.runtime.engine_supervisor import EngineSupervisor
from controlplane.service.runtime.shared_check import SharedCheck
from controlplane.service.runtime.staged_stop import Stage, Stop, stop_all
from controlplane.service.runtime.start_progress import StartProgress
from controlplane.service.runtime.timers import PeriodicTimer
from controlplane.service.status import ServiceStatus

# Routers that know vLLM's names read the page every 50 ms; rendering it takes the event loop about 9 ms.
_METRICS_AGE = milliseconds(200)
_DRAINED = "the service was drained and accepts no requests; restart it"


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts whose sizes depend on what the started backends report."""

    gate: Gate
    intake: Intake
    status: ServiceStatus
    quota_controller: QuotaController | None
    monitor: MemoryMonitor | None


class Service:
    """Starts the backends, builds the gate on what they report, and stops everything in stages.

    `gate`, `intake`, `status`, `live` and `load_reporter` exist from `start` on.
    """

    gate: Gate
    intake: Intake
    status: ServiceStatus
    live: LiveFeed
    load_reporter: LoadReporter

    def __init__(
        self,
        supervisors: Sequence[EngineSupervisor],
        encoders: EncoderRegistry,
        build: Callable[[], Parts],
        *,
        reconfiguration: Reconfiguration,
        metrics: Metrics,
        timer: PeriodicTimer,
        training: LengthTraining | None,
        is_sampled: bool,
    ) -> None:
        """`build` is called once all backends have started. `supervisors` own the LLM engines.

        `is_sampled` starts the samples of the live feed, which need a clock that runs by itself.
        """
        self.reconfiguration = reconfiguration
        self.metrics = metrics
        self.progress = StartProgress()
        self._is_sampled = is_sampled
        self.quota_controller: QuotaController | None = None
        self.monitor: MemoryMonitor | None = None
        self._supervisors = supervisors
        self.encoders = encoders
        self._build = build
        self._timer = timer
        self._training = training
        self._is_started = False
        self._responses = SharedCheck(self._respond)
        self._closers: dict[str, Stop] = {}
        """Of what is written until the last request has ended."""
        self._metrics_page: tuple[Instant, bytes] | None = None

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.reconfiguration.active.config

    @property
    def is_started(self) -> bool:
        """Whether `start` has returned and `stop` was not called."""
        return self._is_started

    def _version_shown(self) -> ShownVersion:
        """What the live feed shows of the configuration in force; no secrets."""
        active = self.reconfiguration.active
        classes = active.config.service_classes()
        return ShownVersion(active.number, classes, masked(document_of(active.config)))

    async def start(self) -> None:
        """Starts all backends, then the gate. Raises BackendDown or ConfigError.

        After an error or a cancellation nothing is left running.
        """
        starts = {supervisor.model: supervisor.start for supervisor in self._supervisors}
        starts |= {model: encoder.start for model, encoder in self.encoders.items()}
        try:
            await self.progress.run(starts)
            parts = self._build()
            self.gate, self.intake, self.status = parts.gate, parts.intake, parts.status
            require_small_reports(self.config, self.status.generators, self.encoders)
            self.load_reporter = self.status.load_reporter = LoadReporter(
                self.gate, self._classes_from_the_default, self.status.generators, self.encoders
            )
            self.quota_controller, self.monitor = parts.quota_controller, parts.monitor
            self.reconfiguration.attach(
                ConfiguredParts(parts.gate, parts.intake, self.metrics, parts.quota_controller)
            )
            self.live = LiveFeed(self.status, self._version_shown(), self._faults)
            self.reconfiguration.listeners.append(self._configured)
            self.reconfiguration.on_guard_end = self.live.guard_ended
            if (workers := self.reconfiguration.workers) is not None:
                workers.on_change = self.live.worker_changed
            if self.quota_controller is not None:
                await self.quota_controller.start()
                self._timer.schedule_periodic(
                    self.config.quota.tick_ms / 1_000, self.quota_controller.tick_now
                )
            if (log := self.status.decision_log) is not None:
                self._closers["the decision log"] = log.close
                self.reconfiguration.listeners.append(lambda version: log.record_config(version.config))
                log.start(self._timer, self.status.owners, self.status.dispatcher.pace_estimators.llm)
            self._closers["tracing"] = self.status.traces.close
            self.status.traces.follow(self.config.tracing)
            if self._training is not None:
                await self._training.start()
            if self.monitor is not None:
                self.monitor.start(self.config.pool.monitor_ms / 1_000)
            for supervisor in self._supervisors:
                supervisor.supervise(
                    partial(self._engine_died, supervisor.model), partial(self._engine_restarted, supervisor)
                )
            if self._is_sampled:
                self.live.start()
        except BaseException:
            await stop_all(self._supervision(), self._periodic_work(), self._engines(), self._closers)
            raise
        self._is_started = True

    def _faults(self) -> dict[str, str]:
        """What the live feed shows as failing: parts, the last change of the configuration, the admission."""
        found = self.status.faults()
        if (failed := self.reconfiguration.failure()) is not None:
            found["configuration"] = failed
        if self.gate.is_closed:
            found["admission"] = _DRAINED
        return found

    def _configured(self, version: ConfigVersion) -> None:
        self.status.config = version.config
        self.status.traces.follow(version.config.tracing)
        self.live.configured(self._version_shown())

    def _classes_from_the_default(self) -> Sequence[ServiceClass]:
        terms = self.reconfiguration.active.terms
        return sorted(terms.classes.values(), key=lambda each: each.name != terms.default_class)

    def metrics_text(self) -> bytes:
        """All series in the Prometheus text format; with vLLM's names at most 0.2 s old.

        Until the service has started only the counters: no engine reports what the gauges show.
        """
        if not self._is_started:
            return self.metrics.exposition({})
        if not self.config.server.vllm_metric_names:
            return self.status.metrics_text(self.load_reporter.utilisation(), has_vllm_names=False)
        now = self.gate.clock.now()
        if self._metrics_page is None or between(self._metrics_page[0], now) >= _METRICS_AGE:
            text = self.status.metrics_text(self.load_reporter.utilisation(), has_vllm_names=True)
            self._metrics_page = (now, text)
        return self._metrics_page[1]

    async def stop(self) -> None:
        """Stops periodic work, drains, then stops the backends; without a start it does nothing."""
        if not self._is_started:
            return
        self._is_started = False
        self.reconfiguration.close()
        self.live.stop()
        self.load_reporter.stop()
        loading: Stage = {}
        if (workers := self.reconfiguration.workers) is not None:
            loading = {"a change of workers": workers.cancel_loading}
        drain: Stage = {"the drain": self.drain}
        stages = (loading, self._supervision(), self._periodic_work(), drain)
        await stop_all(*stages, self._engines(), self._closers)

    async def until_given_up(self) -> None:
        """Returns once an LLM engine is dead and is not restarted."""
        # Without an LLM engine it never returns.
        waits: list[asyncio.Future[Any]] = [asyncio.get_running_loop().create_future()]
        waits += [asyncio.ensure_future(supervisor.given_up.wait()) for supervisor in self._supervisors]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _engine_died(self, model: str, error: BackendDown, reject: Reject) -> None:
        self.live.engine_down(model, str(error))
        self.gate.engine_died(model, error, reject)

    async def _engine_restarted(self, supervisor: EngineSupervisor) -> None:
        """Gives a new engine the options, quotas and state that its predecessor had got since the start."""
        await self.reconfiguration.engine_restarted()
        if self.quota_controller is not None:
            await self.quota_controller.engine_restarted()
        self.gate.engine_restarted()
        self.live.engine_up(supervisor.model, supervisor.start_seconds)

    def _supervision(self) -> Stage:
        return {f"the supervisor of {supervisor.model}": supervisor.stop for supervisor in self._supervisors}

    def _periodic_work(self) -> Stage:
        ticks: Stage = {"the quota timer": self._timer.stop}
        return ticks if self.monitor is None else {**ticks, "the memory monitor": self.monitor.stop}

    def _engines(self) -> Stage:
        """The parts that running requests need until the drain ends."""
        engines: dict[str, Stop] = {
            **{supervisor.model: supervisor.generator.stop for supervisor in self._supervisors},
            **{model: encoder.stop for model, encoder in self.encoders.items()},
        }
        if (workers := self.reconfiguration.workers) is not None:
            engines["workers that are leaving"] = workers.stop
        return engines if self._training is None else {**engines, "length training": self._training.stop}

    async def drain(self, grace: float | None = None) -> None:
        """Ends admission; returns when all requests have ended, or after `grace` seconds.

        `grace` defaults to `server.drain_ms`.
        """
        await self.gate.drain(self.config.server.drain_ms / 1_000 if grace is None else grace)

    async def check(self) -> None:
        """Checks that all backends respond; calls at the same time, or within a second, share one round trip.

        Raises BackendDown naming one that does not, TimeoutError if one takes longer than two seconds.
        """
        if not self._is_started:
            raise BackendDown("the service is starting or stopping")
        if self.gate.is_closed:
            raise BackendDown(_DRAINED, is_permanent=True)
        for supervisor in self._supervisors:
            supervisor.require_up()
        for encoder in tuple(self.encoders.values()):
            if encoder.down is not None:
                # Without a worker it raises at once.
                await encoder.check()
        await self._responses.wait()

    async def _respond(self) -> None:
        """One round trip to each backend."""
        for supervisor in self._supervisors:
            await supervisor.generator.check()
        for encoder in tuple(self.encoders.values()):
            await encoder.check()
