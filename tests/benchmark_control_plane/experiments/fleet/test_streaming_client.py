"""Latencies of a fleet's client count from the planned send times."""

import random
import time
from itertools import pairwise

import httpx
import pytest

from benchmark_control_plane.experiments.fleet import streaming_client
from benchmark_control_plane.experiments.fleet.streaming_client import Ending, StreamedExchange, exchange

STREAM = 'data: {"choices":[{"text":"0.0 "}]}\n\ndata: [DONE]\n\n'


async def test_a_request_that_is_sent_late_has_the_delay_in_its_times():
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=STREAM))
    async with httpx.AsyncClient(transport=transport) as http:
        now = await exchange(http, "http://box", tokens=1)
        late = await exchange(http, "http://box", tokens=1, due=time.monotonic() - 5.0)
    assert (now.ending, late.ending) == (Ending.COMPLETE, Ending.COMPLETE)
    assert now.is_met and now.ttft < 5.0 <= late.ttft <= late.seconds
    assert not late.is_met


async def test_only_a_connection_that_ends_after_its_status_is_cut():
    async def broken():
        yield b"data: "
        raise httpx.ReadError("reset")

    def refused(request):
        raise httpx.RemoteProtocolError("no response")

    endings = []
    for answer in (lambda request: httpx.Response(200, content=broken()), refused):
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            endings.append((await exchange(http, "http://box", tokens=1)).ending)
    assert endings == [Ending.CUT, Ending.UNANSWERED]


async def test_requests_are_due_at_the_drawn_moments(monkeypatch):
    found = []

    async def sent(http, url, *, tokens, due):
        found.append(due)
        return StreamedExchange()

    monkeypatch.setattr(streaming_client, "exchange", sent)
    await streaming_client.offer("http://box", rate=1_000.0, count=20, tokens=1, seed=3)
    draws = random.Random(3)
    draws.expovariate(1_000.0)
    gaps = [after - at for at, after in pairwise(found)]
    assert gaps == pytest.approx([draws.expovariate(1_000.0) for _ in range(19)], abs=1e-8)
