"""How long after an event the dashboard shows it, with the clocks of the server and of Chromium running."""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from backends.testing.scripted import Script
from tests.controlplane.api.operations.test_admin import SETTINGS
from tests.controlplane.api.operations.test_dashboard_in_browser import (
    CHAT,
    CLASSES,
    body,
    dashboard,
    stepped,
)
from tests.controlplane.api.scripted_server import MAX_RUNNING, Stage, at_a_slow_pace, staged, until

# test_dashboard_in_browser checks that they are shown; how soon depends on the speed of the machine.
pytestmark = [pytest.mark.browser, pytest.mark.slow]

_SEEN_WITHIN_S = 2.0
_ROUNDS = 5


@dataclass
class Delays:
    """Seconds from events of each kind to their appearance in the page."""

    page: Any
    seconds: dict[str, list[float]] = field(default_factory=dict)

    async def seen(self, kind: str, began: float, row: Any) -> None:
        """Waits until `row` is in the page; `began` is the time of the event by time.monotonic."""
        await row.wait_for(timeout=10_000)
        self.seconds.setdefault(kind, []).append(time.monotonic() - began)

    def check(self) -> None:
        """Prints the delays, and fails if one is too long."""
        for kind, found in self.seconds.items():
            sys.stdout.write(f"{kind}: seen after {', '.join(f'{each:.2f}' for each in found)} s\n")
        assert max(max(found) for found in self.seconds.values()) <= _SEEN_WITHIN_S, self.seconds


def sample_of(stage: Stage) -> Callable[[], Any]:
    """A function that waits for the next sample: what is recorded at samples is then delayed the most."""
    taken, sample = asyncio.Event(), stage.service.live.sample

    def notify() -> None:
        sample()
        taken.set()

    stage.service.live.sample = notify  # type: ignore[method-assign]

    async def wait() -> None:
        taken.clear()
        await taken.wait()

    return wait


async def test_a_preemption_a_rejection_and_a_restart_are_seen_within_two_seconds():
    sections = {"classes": CLASSES, "admission": {"engine_queue": 0, "max_waiting": 2}}
    async with staged(SETTINGS, is_stepped=True, **sections) as stage, dashboard(stage) as page:
        stage.generator.default = Script(tokens=60)
        delays, next_sample = Delays(page), sample_of(stage)
        asking: list[asyncio.Task[httpx.Response]] = []

        def ask(name: str, service_class: str, tokens: int = 60) -> asyncio.Task[httpx.Response]:
            headers = {"x-request-id": name, "x-service-class": service_class}
            asking.append(
                asyncio.create_task(stage.http.post(CHAT, json=body(max_tokens=tokens), headers=headers))
            )
            return asking[-1]

        def row(table: str, text: str) -> Any:
            return page.locator(f"#rows-{table} .event", has_text=text)

        for n in range(MAX_RUNNING):
            ask(f"batch-{n}", "batch")
        await stage.generator.until_runs(MAX_RUNNING)
        await at_a_slow_pace(stage)
        ask("urgent", "interactive", 3)
        await stage.generator.until_runs(MAX_RUNNING + 1)
        began = time.monotonic()
        await delays.seen("preemption", began, row("preemptions", "urgent").first)
        ask("waiting", "batch")
        for number in range(_ROUNDS):
            # Just after a reading of the page.
            began = time.monotonic()
            late = ask(f"late-{number}", "batch")
            await delays.seen("rejection", began, row("decisions", f"late-{number}").first)
            assert late.result().status_code == 429
        await stepped(stage, asking)
        for number in range(2):
            await next_sample()
            began = time.monotonic()
            stage.generator.die("killed by the test")
            await delays.seen("engine down", began, row("happenings", "engine down").nth(number))
            await until(lambda: stage.service.live.since(0, "").count(b'"state":"up"') > number)  # noqa: B023
            await delays.seen("engine up", time.monotonic(), row("happenings", "serves again").nth(number))
        delays.check()


async def test_a_quota_move_is_seen_within_two_seconds():
    sections = {"classes": CLASSES, "pool": {"kv_allocator": "kvcached"}, "quota": {"tick_ms": 10_000}}
    async with staged(SETTINGS, **sections) as stage, dashboard(stage) as page:
        delays, next_sample = Delays(page), sample_of(stage)
        rows = page.locator("#rows-quotas .event")
        for number in range(2 * _ROUNDS):
            await next_sample()
            began = time.monotonic()
            stage.service.quota_controller.withhold(0 if number % 2 else 3 << 20)
            await stage.service.quota_controller.tick_now()
            await delays.seen("quota move", began, rows.nth(number))
        delays.check()
