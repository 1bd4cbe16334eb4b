"""Measures the live feed under load: time of a sample and of a full answer, and TTFT beside its readers."""

import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import httpx

from backends.cost_models.step_time import affine, llm_only
from benchmark_control_plane.common.distributions import spread
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import SimulatedRequest, simulate
from controlplane.service.live_records import RING_SIZES
from controlplane.service.prediction.length_training import calibration_of
from controlplane.service.service import Service
from predictors.calibration import Calibration

LIVE = 1_000
READING_S = 0.5
"""Between the starts of two readings, as of the dashboard."""
_REPEATS = 101
# Most of them wait; all are in the ledger or in the queue.
_RUNNING = 256
_CLASSES = "abcdef"
_RATE, _TOKENS, _PROMPT = 20.0, 8, 200
_READERS = 3


def with_live_requests() -> dict[str, Any]:
    """CPU ms of a sample, a full answer and that of a second, with `LIVE` requests of six classes.

    As many requests as the calibrations keep have ended in each class.
    """
    machine = Machine(
        llm_only(affine(0.02, 1e-4, 1e-4, 1e-7)), kv_bytes=_RUNNING * 2**20, max_running=_RUNNING
    )
    classes = {name: {"sheddable": False, "default": name == "a"} for name in _CLASSES}
    offered = [SimulatedRequest(0.0, 100, 40, 40, _CLASSES[n % 6]) for n in range(LIVE)]
    found: dict[str, Any] = {}

    def observe(service: Service) -> None:
        asyncio.get_running_loop().call_later(0.3, lambda: found.update(_measured(service)))

    simulate(offered, machine, {"classes": classes, "admission": {"max_waiting": LIVE}}, on_start=observe)
    return found


def _filled(calibration: Calibration) -> int:
    """Scores as many outcomes of each class as the calibration keeps, and returns their number."""
    ended = len(_CLASSES) * calibration.window
    for number in range(ended):
        name = f"ended-{number}"
        calibration.record_forecast(name, (0.5, 0.9), (90.0, 200.0))
        calibration.record_outcome(name, _CLASSES[number % len(_CLASSES)], number % 250)
    return ended


def _measured(service: Service) -> dict[str, Any]:
    live, records = service.live, service.live._recorder.records
    lengths = calibration_of(service.status.lengths)
    if lengths is None:
        raise RuntimeError("the configuration has no length predictor that is calibrated")
    ended = [_filled(each) for each in (lengths, service.status.dispatcher.ttft.calibration)]
    sample = _times(live.sample)
    event = {
        "id": "chatcmpl-0123456789abcdef-17",
        "class": "a",
        "kind": "generate",
        "wait_ms": 123.4,
    }
    for _ in range(RING_SIZES["admission"]):
        records.add("admission", records.clock.now(), event)
    full = _times(lambda: live.since(1, "instance"))
    last = records.last - 20
    return {
        "live_requests": len(service.gate.tickets()),
        "ended_requests": ended[0],
        "sample_ms": sample,
        "full_answer_bytes": len(live.since(1, "instance")),
        "full_answer_ms": full,
        "answer_of_a_second_ms": _times(lambda: live.since(last, "instance")),
    }


def _times(call: Callable[[], object]) -> dict[str, float]:
    """Median and maximum of the CPU milliseconds of a call."""
    found = []
    for _ in range(_REPEATS):
        began = time.process_time()
        call()
        found.append(1e3 * (time.process_time() - began))
    return {"median": round(statistics.median(found), 3), "max": round(max(found), 3)}


async def ttft_by_readers(url: str, model: str, key: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Mean TTFT in ms without and with readers of the feed, in windows that alternate, and their differences.

    The order of the two windows of a round alternates, too.
    """
    windows: dict[int, list[float]] = {0: [], _READERS: []}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await _window(http, model, key, 0, seconds)
        for number in range(rounds):
            for readers in (0, _READERS) if number % 2 else (_READERS, 0):
                windows[readers].append(await _window(http, model, key, readers, seconds))
    added = [read - plain for plain, read in zip(windows[0], windows[_READERS], strict=True)]
    return {
        "rounds": rounds,
        "seconds": seconds,
        "readers": _READERS,
        "ttft_ms": {str(readers): round(statistics.median(each), 2) for readers, each in windows.items()},
        "added_ms": spread(added, 2),
    }


async def _window(http: httpx.AsyncClient, model: str, key: str, readers: int, seconds: float) -> float:
    """Mean TTFT of the requests that arrive in the window; the same arrivals in each."""
    randomness, loop = random.Random(0), asyncio.get_running_loop()
    reading = [asyncio.create_task(_read(http, key)) for _ in range(readers)]
    asking, due = [], loop.time()
    end = due + seconds
    while due < end:
        await asyncio.sleep(max(0.0, due - loop.time()))
        asking.append(asyncio.create_task(_ttft(http, model, due)))
        due += randomness.expovariate(_RATE)
    times = await asyncio.gather(*asking)
    for task in reading:
        task.cancel()
    ended = await asyncio.gather(*reading, return_exceptions=True)
    if failed := [each for each in ended if isinstance(each, Exception)]:
        raise ExceptionGroup("the feed was not read", failed)
    return statistics.fmean(times)


async def _read(http: httpx.AsyncClient, key: str) -> None:
    """Reads what is new on the feed as often as the dashboard does, without the work of a browser."""
    loop, number = asyncio.get_running_loop(), 0
    due = loop.time()
    while True:
        answer = await http.get(f"/admin/live?since={number}", headers={"authorization": f"Bearer {key}"})
        found = re.match(rb'{"next":(\d+)', answer.content)
        if found is None:
            raise RuntimeError(f"GET /admin/live returned {answer.status_code}: {answer.text[:200]}")
        number = int(found[1])
        due = max(due + READING_S, loop.time())
        await asyncio.sleep(due - loop.time())


async def _ttft(http: httpx.AsyncClient, model: str, due: float) -> float:
    """Milliseconds from when a streamed completion was due, by the loop's clock, to its first event."""
    body = {"model": model, "prompt": "x" * _PROMPT, "max_tokens": _TOKENS, "stream": True}
    took, clock = None, asyncio.get_running_loop().time
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if took is None and line.startswith("data: "):
                json.loads(line.removeprefix("data: "))
                took = 1e3 * (clock() - due)
    if took is None:
        raise RuntimeError(f"POST /v1/completions returned {answer.status_code} and no event")
    return took
