"""One trial of the fault suite: a fault is injected under load, and the server's state is compared after."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from benchmark_control_plane.common.process_memory import TreeMemory
from benchmark_control_plane.experiments.faults.clients import (
    COMPLETIONS,
    DONE,
    EMBEDDINGS,
    LOST,
    NOT_CONNECTED,
    PROBE,
    TEXTS,
    BackgroundLoad,
    Probes,
    ask,
    new_client,
)
from benchmark_control_plane.experiments.faults.server_under_test import ServerUnderTest

READY_WITHIN_S = 2.0
"""After a death, /ready is 503 within this time."""
HEALTH_WITHIN_MS, MOST_GROWTH_MB = 100.0, 300.0
"""Longest wait of /health on its own port, and most memory of server and children above that before."""
_RECOVERY_S = 120.0
_SETTLE_S = 20.0
_POLL_S = 0.1
_MEMORY_PERIOD_S = 0.2
# Files that the server opens late, such as those of its checkpoint.
_DESCRIPTORS = 20
_HELD = ("tandem_held_bytes", "tandem_requests_running", "tandem_requests_waiting")


@dataclass(slots=True)
class Trial:
    """What an injection may use, and what it found.

    Attributes:
        server: the server, under load.
        probes: the other tenant.
        death: when a process was killed or stopped (monotonic seconds); None if none was.
        notes: further figures of the fault, by name.
        lost: requests of the injection itself that got no answer, by what they got.
        failures: claims about the fault that do not hold.
    """

    server: ServerUnderTest
    probes: Probes
    death: float | None = None
    notes: dict[str, object] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def died(self) -> None:
        """Marks the time of the last death."""
        self.death = time.monotonic()

    def _is_stated(self) -> bool:
        death = self.death
        return death is not None and self.probes.seconds_until(is_ready=False, after=death) is not None

    async def until_down(self) -> None:
        """Waits until /ready states the death. Raises TimeoutError."""
        async with asyncio.timeout(_RECOVERY_S):
            while not self._is_stated():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S / 10)

    async def until_back(self) -> None:
        """Waits until /ready is 200 on both ports after it was not. Raises TimeoutError."""
        begin = time.monotonic()
        async with asyncio.timeout(_RECOVERY_S):
            while self.probes.seconds_until(is_ready=True, after=begin) is None:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S / 10)


Injection = Callable[[Trial], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class FaultRow:
    """One row of the suite.

    Attributes:
        inject: injects the fault and returns when it has passed.
        is_death: a process is killed, which /ready must state and which the server must repair.
        exit_status: the server ends with it; None: it goes on.
    """

    inject: Injection
    is_death: bool = False
    exit_status: int | None = None


@dataclass(frozen=True, slots=True)
class StateAfter:
    """State of a server after a trial. None where it has ended.

    MB are 10^6 bytes of the server and its children, above those before; earlier results are of the server
    alone.
    """

    held_bytes: float | None = None
    open_requests: float | None = None
    peak_growth_mb: float | None = None
    growth_mb: float | None = None
    more_descriptors: int | None = None

    def failures(self) -> Iterator[str]:
        """The claims that do not hold."""
        if self.held_bytes:
            yield f"{self.held_bytes:g} bytes held"
        if self.open_requests:
            yield f"{self.open_requests:g} requests open"
        if self.more_descriptors is not None and self.more_descriptors > _DESCRIPTORS:
            yield f"{self.more_descriptors} more descriptors are open"


@dataclass(frozen=True, slots=True)
class Found:
    """Result of one trial; waits are the longest.

    `failures` are the claims that do not hold. `slow` are waits and memory above their limits, which a busy
    machine causes as well.
    """

    row: str
    run: int
    failures: list[str]
    notes: dict[str, object]
    exit_status: int | None
    sent: int = 0
    endings: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    not_ready_s: float | None = None
    back_s: float | None = None
    health_ms: float = 0.0
    health_port_ms: float = 0.0
    other_chats: dict[str, int] = field(default_factory=dict)
    other_chat_ms: float = 0.0
    after: StateAfter = StateAfter()
    slow: list[str] = field(default_factory=list)


async def run_trial(name: str, number: int, fault: FaultRow, server: ServerUnderTest) -> Found:
    """Injects one fault under load and compares the state of the server before and after.

    A fault that does not have its effect is a failure, so that the rows after it are still run.
    """
    memory, descriptors = server.memory(), server.descriptors()
    memory.reset_peak()
    load, probes = BackgroundLoad(server), Probes(server)
    trial = Trial(server, probes)
    failures: list[str] = []
    status: int | None = None
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(probes.running())
        await stack.enter_async_context(load.running())
        await stack.enter_async_context(_sampled(memory))
        try:
            await fault.inject(trial)
        except TimeoutError:
            failures.append("what the fault leads to did not happen in time")
        if fault.exit_status is not None:
            status = await asyncio.to_thread(server.process.wait, _RECOVERY_S)
        elif not await _serves_again(server, probes):
            failures.append(f"it does not serve again within {_RECOVERY_S:g} s")
    counted = load.endings + probes.chats
    lost = trial.lost + Counter({how: n for how, n in counted.items() if how.startswith(LOST)})
    failures += [*trial.failures, *(f"{n}x {how}" for how, n in lost.items())]
    after = StateAfter()
    if status != fault.exit_status:
        failures.append(f"exit status {status} instead of {fault.exit_status}")
    elif status is None:
        after = await _state_after(server, memory, descriptors)
        failures += after.failures()
    down, back = _readiness(trial)
    if fault.is_death and (down is None or down > READY_WITHIN_S):
        failures.append(f"/ready states the death after {down} s")
    if trial.death is not None and back is None:
        failures.append("/ready is not 200 again")
    health_port_ms = longest_ms(probes.health_port_s)
    return Found(
        row=name, run=number, failures=failures, notes=trial.notes, exit_status=status,
        sent=load.endings.total() - load.endings[NOT_CONNECTED],
        endings=dict(load.endings), lost=lost.total(), not_ready_s=_rounded(down),
        back_s=_rounded(back), health_ms=longest_ms(probes.health_s),
        health_port_ms=health_port_ms, other_chats=dict(probes.chats),
        other_chat_ms=longest_ms(probes.chat_s), after=after, slow=list(exceeded(health_port_ms, after)),
    )  # fmt: skip


def exceeded(health_port_ms: float, after: StateAfter) -> Iterator[str]:
    """The waits and the memory that are above their limits."""
    if health_port_ms > HEALTH_WITHIN_MS:
        yield f"/health on its own port waited {health_port_ms:g} ms"
    for when, growth in (("meanwhile", after.peak_growth_mb), ("after", after.growth_mb)):
        if growth is not None and growth > MOST_GROWTH_MB:
            yield f"{growth:g} MB more {when}"


@asynccontextmanager
async def _sampled(memory: TreeMemory) -> AsyncIterator[None]:
    """Reads the memory until the block ends."""

    async def sample() -> None:
        while True:
            await asyncio.to_thread(memory.sample)
            await asyncio.sleep(_MEMORY_PERIOD_S)

    sampling = asyncio.create_task(sample())
    try:
        yield
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)


def _readiness(trial: Trial) -> tuple[float | None, float | None]:
    """Seconds from the death until /ready stated it, and until it was 200 again on both ports."""
    if trial.death is None:
        return None, None
    down = trial.probes.seconds_until(is_ready=False, after=trial.death)
    return down, trial.probes.seconds_until(is_ready=True, after=trial.death + (down or 0.0))


async def _state_after(server: ServerUnderTest, memory: TreeMemory, descriptors: int) -> StateAfter:
    held, opened = await settled(server)
    more = await _more_descriptors(server, descriptors)
    return StateAfter(held, opened, memory.peak_growth_mb(), memory.growth_mb(), more)


async def _serves_again(server: ServerUnderTest, probes: Probes) -> bool:
    """Whether /ready is 200 and a chat and an embedding succeed; waits for it."""
    end = time.monotonic() + _RECOVERY_S
    async with new_client(server) as http:
        while time.monotonic() < end:
            is_ready = bool(probes.readiness) and probes.readiness[-1][1] == 2
            requests = ((COMPLETIONS, PROBE), (EMBEDDINGS, TEXTS))
            if is_ready and all([await ask(http, path, body, "other") == DONE for path, body in requests]):
                return True
            await asyncio.sleep(_POLL_S)
    return False


async def settled(server: ServerUnderTest) -> tuple[float, float]:
    """Bytes that are held and requests that are open, at the latest after some time."""
    end = time.monotonic() + _SETTLE_S
    while True:
        found = await asyncio.to_thread(server.metrics)
        held, *requests = (found[name] for name in _HELD)
        if (not held and not any(requests)) or time.monotonic() > end:
            return held, sum(requests)
        await asyncio.sleep(_POLL_S)


async def _more_descriptors(server: ServerUnderTest, before: int) -> int:
    """Descriptors that are open beyond those before, at the latest after some time."""
    end = time.monotonic() + _SETTLE_S
    while (left := server.descriptors() - before) > 0 and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    return left


def longest_ms(waits: Sequence[float]) -> float:
    """The longest of these seconds in milliseconds; 0 without any."""
    return round(1e3 * max(waits, default=0.0), 1)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
