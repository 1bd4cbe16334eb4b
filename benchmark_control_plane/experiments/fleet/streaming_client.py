"""Streams completions of simulated boxes, and states how each ended and when its tokens arrived."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from enum import Enum

import httpx

from benchmark_control_plane.experiments.fleet.simulated_boxes import MODEL, TPOT_SECONDS, TTFT_SECONDS


class Ending(Enum):
    """How an exchange ended; only UNANSWERED, without a status, is a loss without an answer."""

    COMPLETE = "complete"
    REFUSED = "refused"
    CUT = "cut"
    UNANSWERED = "unanswered"


@dataclass(slots=True)
class StreamedExchange:
    """One request.

    Attributes:
        ending: how it ended.
        status: HTTP status; 0 without one.
        retry_after: the header of that name.
        seconds: from when it was due to the end.
        ttft: seconds from when it was due to the first token.
        delays: seconds of each token from the engine to the client.
        tokens: when the tokens arrived, in seconds of the monotonic clock.
    """

    ending: Ending = Ending.UNANSWERED
    status: int = 0
    retry_after: str | None = None
    seconds: float = 0.0
    ttft: float = 0.0
    delays: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)

    @property
    def is_met(self) -> bool:
        """Whether it has an answer within the objectives of the boxes' class."""
        if self.ending is not Ending.COMPLETE:
            return False
        tpot = (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)
        return self.ttft <= TTFT_SECONDS and tpot <= TPOT_SECONDS


def client(timeout: float = 10.0) -> httpx.AsyncClient:
    """A client for many connections; one that hears nothing for `timeout` seconds gives up."""
    limits = httpx.Limits(max_connections=1_000, max_keepalive_connections=1_000)
    return httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)


async def exchange(
    http: httpx.AsyncClient,
    url: str,
    *,
    tokens: int,
    request_id: str | None = None,
    due: float | None = None,
) -> StreamedExchange:
    """Sends one request, `due` then on the monotonic clock (None: now), and reads its stream."""
    found, begin = StreamedExchange(), time.monotonic() if due is None else due
    body = {"model": MODEL, "prompt": "x" * 100, "max_tokens": tokens, "stream": True}
    headers = {} if request_id is None else {"x-request-id": request_id}
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
            found.status = answer.status_code
            found.retry_after = answer.headers.get("retry-after")
            found.ending = Ending.CUT if answer.status_code == 200 else Ending.REFUSED
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    found.ending = Ending.COMPLETE
                elif line.startswith("data: ") and answer.status_code == 200:
                    _read(found, json.loads(line.removeprefix("data: ")), begin)
    except httpx.TimeoutException:
        found.ending = Ending.UNANSWERED
    except httpx.TransportError:
        found.ending = Ending.CUT if found.status else Ending.UNANSWERED
    found.seconds = time.monotonic() - begin
    return found


def _read(found: StreamedExchange, chunk: dict[str, object], begin: float) -> None:
    choices = chunk.get("choices")
    text = choices[0]["text"] if isinstance(choices, list) and choices else ""
    if text:
        now = time.monotonic()
        found.ttft = found.ttft or now - begin
        found.tokens.append(now)
        found.delays.append(now - float(text.split()[-1]))


async def offer(url: str, *, rate: float, count: int, tokens: int, seed: int) -> list[StreamedExchange]:
    """Sends `count` requests at Poisson arrivals of `rate` per second."""
    draws, due, running = random.Random(seed), time.monotonic(), []
    async with client(60.0) as http:
        for _ in range(count):
            due += draws.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            running.append(asyncio.create_task(exchange(http, url, tokens=tokens, due=due)))
        return list(await asyncio.gather(*running))
