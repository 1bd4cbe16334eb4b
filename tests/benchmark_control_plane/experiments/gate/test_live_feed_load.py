"""The feed's cost under load is measured while the requests are live, and for an answer of full size."""

import asyncio
import random
import re
from contextlib import closing
from types import SimpleNamespace

import pytest

from benchmark_control_plane.experiments.gate import live_feed_load
from benchmark_control_plane.simulator.virtual_time import VirtualTimeLoop, run
from controlplane.api.operations.dashboard import FOLDER
from controlplane.service.live_records import MAX_ANSWER_BYTES
from predictors.calibration import Calibration


def test_a_sample_and_an_answer_are_measured_with_live_requests(monkeypatch):
    monkeypatch.setattr(live_feed_load, "LIVE", 12)
    monkeypatch.setattr(live_feed_load, "_REPEATS", 3)
    found = live_feed_load.with_live_requests()
    assert found["live_requests"] == 12
    # A loaded server's calibrations are full, and each sample reads them.
    assert found["ended_requests"] == 6 * Calibration().window
    assert 0 < found["full_answer_bytes"] <= MAX_ANSWER_BYTES
    for name in ("sample_ms", "full_answer_ms", "answer_of_a_second_ms"):
        assert 0 <= found[name]["median"] <= found[name]["max"]


@pytest.mark.parametrize("cost", [0.0, 0.02])
def test_a_client_that_falls_behind_keeps_the_arrivals(monkeypatch, cost):
    """Else it would send less beside readers, whose work delays it, or leave that delay out of the times."""
    asked = []

    async def answered():
        return 1.0

    with closing(VirtualTimeLoop()) as loop:

        def ask(http, model, due):
            asked.append(due)
            loop._set_time(loop.time() + cost)
            return answered()

        monkeypatch.setattr(live_feed_load, "_ttft", ask)
        loop.run_until_complete(live_feed_load._window(None, "model", "key", 0, 10.0))
    randomness, due = random.Random(0), [0.0]
    while due[-1] < 10.0:
        due.append(due[-1] + randomness.expovariate(live_feed_load._RATE))
    assert asked == pytest.approx(due[:-1])


def test_a_reader_asks_as_often_as_the_page():
    source = (FOLDER / "feed.js").read_text(encoding="utf-8")
    assert re.search(r"const PERIOD_MS = (\d+);", source)[1] == f"{1e3 * live_feed_load.READING_S:.0f}"
    asked = []

    class Http:
        async def get(self, path, headers):
            asked.append((asyncio.get_running_loop().time(), path))
            await asyncio.sleep(0.1)
            return SimpleNamespace(content=b'{"next":%d,' % len(asked))

    async def read_for_two_seconds():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await live_feed_load._read(Http(), "key")

    run(read_for_two_seconds())
    assert asked == [(0.5 * number, f"/admin/live?since={number}") for number in range(4)]
