"""Sends the passes of one embedding worker when they are due, and chooses its scheduling class.

A pass is sent when an input arrives or a pass ends. One that is not worth its cost to the running generations
is decided again after some milliseconds, since the cost changes with every engine step.

A worker with `idle_cpu_priority` is in the idle class only while a generation runs and every embedding can
wait. There the kernel decides when it runs, and passes have no cost.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

from backends.embedding.batch_dispatcher import BatchDispatcher
from backends.embedding.cpu_class import CpuClass, may_leave_idle_class
from backends.embedding.ipc import Frame, FrameKind, pack_inputs
from controlplane.core.clock import Instant, between, to_seconds
from controlplane.core.engine_reports import DeviceSharing
from controlplane.core.ports import PauseCost

_log = logging.getLogger(__name__)

_REPRICE_SECONDS = 0.005
# Deciding again takes at most this share of the event loop's time.
_REPRICE_SHARE = 0.05


class PassHooks(Protocol):
    """The hooks of `Embedder` that a gate sets; None without a gate."""

    on_computing: Callable[[bool], None] | None
    pause_cost: Callable[[], PauseCost | None] | None


class PassSender:
    """Sends passes to the worker that is ready."""

    def __init__(self, dispatcher: BatchDispatcher, hooks: PassHooks) -> None:
        self._hooks = hooks
        self._dispatcher = dispatcher
        self._was_computing = False
        self._send_frame: Callable[[Frame], None] | None = None
        self._cpu_class: CpuClass | None = None
        self._scheduled: asyncio.Handle | None = None
        self._next_check: asyncio.TimerHandle | None = None

    def worker_ready(self, pid: int, send_frame: Callable[[Frame], None], *, may_idle: bool) -> None:
        """Sends passes with `send_frame` from now on; a worker that `may_idle` enters the idle class."""
        self._send_frame = send_frame
        self._cpu_class = CpuClass(pid) if may_idle else None
        self.schedule()

    @property
    def sharing(self) -> DeviceSharing:
        """Whether the worker may be in the idle class while a generation runs."""
        return DeviceSharing.BESIDE if self._usable_class() is None else DeviceSharing.IDLE

    def _usable_class(self) -> CpuClass | None:
        """The class of a worker that may idle; None if a gate is to move it and could not move it back."""
        is_usable = self._cpu_class is None or self._hooks.pause_cost is None or self._may_leave
        return self._cpu_class if is_usable else None

    @cached_property
    def _may_leave(self) -> bool:
        """Whether this process may move its workers out of the idle class; warns if not."""
        if not (found := may_leave_idle_class()):
            _log.warning(
                "embedding workers stay in the normal scheduling class, because this process may not move "
                "them out of the idle class again; permit it with CAP_SYS_NICE or `ulimit -e 20`, or set "
                "idle_cpu_priority: false"
            )
        return found

    def worker_gone(self) -> None:
        """Sends nothing until the next worker is ready."""
        self._send_frame = self._cpu_class = None
        if self._next_check is not None:
            self._next_check.cancel()

    def schedule(self) -> None:
        """Sends passes once the event loop has processed all requests that arrived together."""
        if self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        self._scheduled = None
        self.send()

    def send(self, *, starts_small: bool = True) -> None:
        """Sends the passes that are due; `starts_small` is that of `BatchDispatcher.next_batch`.

        A defect fails all calls with BackendDown and is raised again, since nothing would send them later.
        """
        try:
            self._send_due(starts_small=starts_small)
        except Exception as error:
            self._dispatcher.fail_all(f"no embedding pass can be sent: {error!r}")
            raise
        self.announce()

    def announce(self) -> None:
        """Calls `on_computing` if passes have begun to be under way, or none is any more."""
        is_computing = self._dispatcher.has_batches_in_flight
        if is_computing is not self._was_computing:
            self._was_computing = is_computing
            if self._hooks.on_computing is not None:
                self._hooks.on_computing(is_computing)

    def _send_due(self, *, starts_small: bool) -> None:
        if self._next_check is not None:
            self._next_check.cancel()
        while self._send_frame is not None:
            now = Instant(time.monotonic_ns())
            cost = None if self._hooks.pause_cost is None else self._hooks.pause_cost()
            self._set_cpu_class(cost, now)
            if self._cpu_class is not None and self._cpu_class.is_idle:
                # The kernel preempts the worker, so shorter passes would only cost throughput.
                cost = None
            batch = self._dispatcher.next_batch(cost, now, starts_small=starts_small)
            if batch is None:
                if cost is not None and self._dispatcher.has_withheld_calls:
                    took = to_seconds(between(now, Instant(time.monotonic_ns())))
                    self._check_after(max(_REPRICE_SECONDS, took / _REPRICE_SHARE))
                return
            number, inputs = batch
            self._send_frame(Frame(FrameKind.BATCH, number, pack_inputs(inputs)))

    def _set_cpu_class(self, cost: PauseCost | None, now: Instant) -> None:
        if (cpu_class := self._usable_class()) is None:
            return
        if self._hooks.pause_cost is None:
            # Not before the first call: the gate is made after the workers have started.
            if self._dispatcher.has_withheld_calls:
                cpu_class.set(is_idle=True)
            return
        leave_at = now if cost is None else self._dispatcher.latest_start(now)
        cpu_class.set(is_idle=leave_at is None or leave_at > now)
        if cpu_class.is_idle and leave_at is not None:
            self._check_after(max(_REPRICE_SECONDS, to_seconds(between(now, leave_at))))

    def _check_after(self, delay_seconds: float) -> None:
        if self._next_check is not None:
            self._next_check.cancel()
        self._next_check = asyncio.get_running_loop().call_later(delay_seconds, self.send)
