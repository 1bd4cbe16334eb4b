"""Statistics of the engine's latest step, written by vLLM's stat-logger hook.

vLLM sends statistics only with steps: an engine that becomes idle by an abort sends no more.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from controlplane.core.clock import NO_TIME, Duration
from controlplane.core.engine_reports import EngineStep


@dataclass(slots=True)
class EngineStats:
    """Latest statistics of one engine, and the callbacks for new ones.

    Attributes:
        kv_usage: used share of the KV blocks, 0 to 1.
        running: running requests.
        waiting: waiting requests.
        preemptions: preemptions since the start.
        cells: tokens that the KV cache can hold.
        on_step: called for each step that directly followed another, so that its duration is known.
        on_report: called for every report.
        waited: returns the time for which Tandem's scheduler has delayed steps on purpose since the start.
    """

    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    cells: int = 0
    on_step: Callable[[EngineStep], None] | None = None
    on_report: Callable[[], None] | None = None
    waited: Callable[[], Duration] | None = None
    _last_ns: int | None = None
    _waited: Duration = NO_TIME

    def logger_class(self) -> type[PrometheusStatLogger]:
        """A logger class bound to this object, for `AsyncLLM(stat_loggers=[...])`."""
        stats = self

        class StatsLogger(PrometheusStatLogger):  # type: ignore[misc]
            """Replaces vLLM's Prometheus logger, which vLLM would otherwise add to any other logger.

            That logger costs a fifteenth of the server's time per token, and its registry is not exported.
            """

            def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
                self.engine_indexes = engine_indexes or [0]

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
            ) -> None:
                stats.record(scheduler_stats, iteration_stats)

            def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
                pass

            def log_engine_initialized(self) -> None:
                pass

        return StatsLogger

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Takes over vLLM's `SchedulerStats` and `IterationStats` of one step; either may be None."""
        if scheduler_stats is not None and iteration_stats is not None:
            self._note_step(scheduler_stats, iteration_stats)
        if scheduler_stats is not None:
            self.kv_usage = scheduler_stats.kv_cache_usage
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
        if self.on_report is not None:
            self.on_report()

    def _note_step(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Reports the step; called before `kv_usage` is updated, so that it is the usage the step read."""
        now, before = time.monotonic_ns(), self._last_ns
        waited, self._waited = self._waited, NO_TIME if self.waited is None else self.waited()
        tokens: int = iteration_stats.num_generation_tokens
        self._last_ns = now if scheduler_stats.num_running_reqs else None
        if before is not None and tokens and self.on_step is not None:
            prompts: int = iteration_stats.prompt_token_stats.computed
            cells = round(self.kv_usage * self.cells)
            took = Duration(now - before)
            paused = Duration(min(took, self._waited - waited))
            self.on_step(EngineStep(prompts, tokens, cells, took, paused))
