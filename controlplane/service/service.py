"""The service object: starts and stops backends, timers and monitor; checks, drains, reconfigures."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from controlplane.config import Config
from controlplane.config.reconfigure import changed
from controlplane.core.errors import BackendDown
from controlplane.core.ports import Embedder, Generator
from controlplane.service.gate.gate import Gate
from controlplane.service.gate.intake import Intake
from controlplane.service.gate.policies import Policies
from controlplane.service.memory.monitor import MemoryMonitor
from controlplane.service.memory.quota_controller import QuotaController
from controlplane.service.prediction.length_training import LengthTraining
from controlplane.service.runtime.engine_control import EngineConfigurator
from controlplane.service.runtime.staged_stop import Stage, stop_all
from controlplane.service.runtime.timers import PeriodicTimer
from controlplane.service.status import ServiceStatus


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

    `gate`, `intake` and `status` exist from `start` on.
    """

    gate: Gate
    intake: Intake
    status: ServiceStatus

    def __init__(
        self,
        config: Config,
        backends: Sequence[Generator | Embedder],
        build: Callable[[], Parts],
        *,
        policies_of: Callable[[Config], Policies],
        configurator: EngineConfigurator,
        timer: PeriodicTimer,
        training: LengthTraining | None,
    ) -> None:
        """`build` is called once all backends have started."""
        self.config = config
        self.quota_controller: QuotaController | None = None
        self.monitor: MemoryMonitor | None = None
        self._backends = backends
        self._build = build
        self._policies_of = policies_of
        self._configurator = configurator
        self._timer = timer
        self._training = training
        self._reconfiguring = asyncio.Lock()
        self._is_started = False

    async def start(self) -> None:
        """Starts all backends, then the gate. Raises BackendDown or ConfigError.

        After an error or a cancellation nothing is left running.
        """
        starts = (backend.start() for backend in self._backends)
        try:
            results = await asyncio.gather(*starts, return_exceptions=True)
            if errors := [r for r in results if isinstance(r, BaseException)]:
                raise errors[0]
            parts = self._build()
            self.gate, self.intake, self.status = parts.gate, parts.intake, parts.status
            self.quota_controller, self.monitor = parts.quota_controller, parts.monitor
            if self.quota_controller is not None:
                await self.quota_controller.start()
                self._timer.schedule_periodic(
                    self.config.quota.tick_ms / 1_000, self.quota_controller.tick_now
                )
            if self._training is not None:
                await self._training.start()
            if self.monitor is not None:
                self.monitor.start(self.config.pool.monitor_ms / 1_000)
        except BaseException:
            await stop_all(self._periodic_work(), self._engines())
            raise
        self._is_started = True

    async def stop(self) -> None:
        """Stops periodic work, drains, then stops the backends; without a start it does nothing."""
        if not self._is_started:
            return
        self._is_started = False
        await stop_all(self._periodic_work(), {"the drain": self.drain}, self._engines())

    def _periodic_work(self) -> Stage:
        ticks: Stage = {"the quota timer": self._timer.stop}
        return ticks if self.monitor is None else {**ticks, "the memory monitor": self.monitor.stop}

    def _engines(self) -> Stage:
        """The parts that running requests need until the drain ends."""
        engines: Stage = {backend.model: backend.stop for backend in self._backends}
        return engines if self._training is None else {**engines, "length training": self._training.stop}

    async def drain(self, grace: float | None = None) -> None:
        """Ends admission; returns when all requests have ended, or after `grace` seconds.

        `grace` defaults to `server.drain_ms`.
        """
        await self.gate.drain(self.config.server.drain_ms / 1_000 if grace is None else grace)

    async def check(self) -> None:
        """Raises BackendDown naming the backend that does not respond."""
        if not self._is_started:
            raise BackendDown("the service is starting or stopping")
        if self.gate.is_closed:
            raise BackendDown("the service was drained and accepts no requests; restart it")
        for backend in self._backends:
            await backend.check()

    async def reconfigure(self, content: object) -> None:
        """Changes policies and parameters, first in the engine and then in the gate; one change at a time.

        Raises ConfigError, Refused, BackendDown or BackendFailed; then the gate is unchanged.
        """
        async with self._reconfiguring:
            config = changed(self.config, content)
            policies = self._policies_of(config)
            await self._configurator.apply(config.engine_options())
            self.config = config
            self.gate.set_policies(policies)
