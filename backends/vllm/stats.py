"""What did the engine's last step report? One small board, written by vLLM's statistics hook.

Statistics travel only with steps: an engine that just became idle by an abort reports nothing more.
"""

from dataclasses import dataclass
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


@dataclass(slots=True)
class StatBoard:
    """`kv_usage` is the used share of the KV blocks; `preemptions` counts since the start."""

    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0

    def logger(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """A factory as `AsyncLLM(stat_loggers=[…])` wants it."""
        return _BoardLogger(self)


class _BoardLogger(StatLoggerBase):  # type: ignore[misc]
    def __init__(self, board: StatBoard) -> None:
        self._board = board

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._board.kv_usage = scheduler_stats.kv_cache_usage
            self._board.running = scheduler_stats.num_running_reqs
            self._board.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        if iteration_stats is not None:
            self._board.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        pass
