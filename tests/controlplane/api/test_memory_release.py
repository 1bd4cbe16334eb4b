"""Memory of requests that have ended: nothing refers to them, and the allocator returns it."""

import asyncio

import pytest

from controlplane.api import post_endpoint
from controlplane.api.settings import ApiSettings, BodyLimits
from controlplane.service.ticket import Rejected
from tests.controlplane.api.example_bodies import CHAT, EMBED, chat, embed
from tests.controlplane.api.scripted_server import staged, until

LARGE = "x " * 2_500


class CountedRelease:
    """A `MemoryRelease` that only counts."""

    def __init__(self) -> None:
        self.count = 0

    def schedule(self) -> None:
        self.count += 1


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> CountedRelease:
    found = CountedRelease()
    monkeypatch.setattr(post_endpoint, "MemoryRelease", lambda: found)
    return found


@pytest.mark.parametrize(
    ("path", "body", "status", "count"),
    [
        (CHAT, chat(), 200, 0),
        (EMBED, embed(), 200, 0),
        # Sixteen numbers for each text.
        (EMBED, embed(input=["hi"] * 20), 200, 1),
        (CHAT, chat(n=8, stream=True), 200, 0),
        (CHAT, chat(n=64, max_tokens=64, stream=True), 200, 1),
        # Once when it is parsed, and once at its end.
        (CHAT, chat(user=LARGE), 200, 2),
        # It is refused for its tokens.
        (CHAT, chat(messages=[{"role": "user", "content": LARGE}]), 400, 2),
    ],
    ids=["chat", "embedding", "large answer", "stream", "long stream", "large body", "refused"],
)
async def test_it_is_returned_at_the_end(
    release: CountedRelease, path: str, body: dict[str, object], status: int, count: int
):
    async with staged(ApiSettings(limits=BodyLimits(inline_body=2_000))) as stage:
        answer = await stage.http.post(path, json=body)
        assert (answer.status_code, release.count) == (status, count), answer.text


async def test_the_error_of_an_evicted_stream_keeps_nothing_of_its_request():
    """Its ticket is remembered for explanations."""
    async with staged(is_stepped=True) as stage:
        asking = asyncio.create_task(stage.http.post(CHAT, json=chat(stream=True)))
        await stage.generator.until_runs(1)
        stage.generator.allow()
        (ticket,) = stage.service.gate.tickets()
        await until(lambda: ticket.timeline.output_tokens == 1)
        await stage.service.gate.drain(0)
        assert "event: error" in (await asking).text
        error = ticket.granted.exception()
        assert isinstance(error, Rejected) and error.__traceback__ is None
        assert ticket in stage.service.gate.dispatcher.recorder.kept
