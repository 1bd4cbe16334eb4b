"""One round trip to the backends serves all probes of a second, and a hung backend delays none for long."""

import asyncio

import pytest

from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.errors import BackendDown
from controlplane.service.runtime.shared_check import SharedCheck


class Backend:
    """Counts its round trips, each of which takes `seconds` and then raises `error`."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.trips = 0
        self.seconds, self.error = seconds, error

    async def check(self) -> None:
        self.trips += 1
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error


def now() -> float:
    return asyncio.get_running_loop().time()


def test_probes_at_the_same_time_share_a_round_trip():
    async def scenario() -> None:
        backend = Backend(seconds=0.5)
        shared = SharedCheck(backend.check)
        await asyncio.gather(*(shared.wait() for _ in range(1_000)))
        assert (backend.trips, now()) == (1, pytest.approx(0.5))

    run(scenario())


def test_a_success_is_kept_for_a_second_and_a_failure_is_not():
    async def scenario() -> None:
        backend = Backend()
        shared = SharedCheck(backend.check)
        for _ in range(20):
            await shared.wait()
            await asyncio.sleep(0.1)
        assert backend.trips == 2
        await asyncio.sleep(1)
        backend.error = BackendDown("it died")
        for trips in (3, 4):
            with pytest.raises(BackendDown, match="it died"):
                await shared.wait()
            assert backend.trips == trips
        backend.error = None
        await shared.wait()

    run(scenario())


def test_a_backend_that_hangs_is_reported_after_two_seconds_and_then_at_once():
    async def scenario() -> None:
        backend = Backend(seconds=15)
        shared = SharedCheck(backend.check)
        for asked, told in ((0.0, 2.0), (3.0, 3.0), (14.0, 14.0)):
            await asyncio.sleep(asked - now())
            with pytest.raises(TimeoutError):
                await shared.wait()
            assert now() == pytest.approx(told)
        # It responds late, and is asked again.
        await asyncio.sleep(2)
        backend.seconds = 0.0
        await shared.wait()
        assert backend.trips == 2

    run(scenario())


def test_a_probe_that_leaves_does_not_end_the_round_trip_of_others():
    async def scenario() -> None:
        backend = Backend(seconds=1.5)
        shared = SharedCheck(backend.check)
        leaving, staying = (asyncio.create_task(shared.wait()) for _ in range(2))
        await asyncio.sleep(0.1)
        leaving.cancel()
        await staying
        assert (backend.trips, now(), leaving.cancelled()) == (1, pytest.approx(1.5), True)

    run(scenario())
