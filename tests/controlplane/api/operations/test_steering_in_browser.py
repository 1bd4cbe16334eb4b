"""The panel of the dashboard that changes the server, in Chromium on a served application."""

from typing import Any

import pytest

from tests.controlplane.api.operations.test_admin import ADMIN, SETTINGS
from tests.controlplane.api.operations.test_dashboard_in_browser import CLASSES, dashboard
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage, staged, until

pytestmark = pytest.mark.browser

CHANGE = "classes:\n  batch: {priority: 3}"


async def steering(page: Any) -> Any:
    """The opened panel."""
    await page.get_by_role("button", name="Change", exact=True).click()
    return page.get_by_label("Change the server")


async def tried(panel: Any, text: str) -> None:
    await panel.get_by_label("Part of the configuration", exact=True).fill(text)
    await panel.get_by_role("button", name="Try", exact=True).click()


def priority(stage: Stage) -> int:
    return stage.service.config.classes["batch"].priority


async def test_a_change_is_tried_applied_and_undone():
    async with staged(SETTINGS, classes=CLASSES) as stage, dashboard(stage) as page:
        panel, active = await steering(page), stage.service.reconfiguration
        apply = panel.get_by_role("button", name="Apply")
        assert await apply.is_disabled()
        await tried(panel, CHANGE)
        await panel.get_by_text("classes.batch.priority: 0 → 3").wait_for()
        assert active.active.number == 1
        await apply.click()
        await panel.get_by_text("Version 2 is in force").wait_for()
        assert (active.active.number, active.active.config.classes["batch"].priority) == (2, 3)
        # What was applied has to be tried again.
        assert await apply.is_disabled()
        await panel.get_by_role("button", name="Try undoing the last change").click()
        await panel.get_by_text("classes.batch.priority: 3 → 0").wait_for()
        await apply.click()
        await panel.get_by_text("Version 3 is in force").wait_for()
        assert active.active.config.classes["batch"].priority == 0
        await page.locator("#rows-happenings .event", has_text="version 3").wait_for()
        await page.keyboard.press("Escape")
        await panel.wait_for(state="hidden")


async def test_a_change_for_a_time_is_undone_by_the_server():
    async with staged(SETTINGS, classes=CLASSES) as stage, dashboard(stage) as page:
        panel, active = await steering(page), stage.service.reconfiguration
        await panel.get_by_label("Afterwards", exact=True).select_option(label="Undo it after the time")
        await panel.get_by_label("Time, minutes", exact=True).fill("0.02")
        assert await panel.get_by_label("Points of attainment", exact=True).is_hidden()
        await tried(panel, CHANGE)
        await panel.get_by_role("button", name="Apply").click()
        await panel.get_by_text("Version 2 is in force").wait_for()
        await panel.get_by_text("The server undoes it after 0.02 min.").wait_for()
        assert active.guard.to_json()["seconds"] == pytest.approx(1.2)
        await until(lambda: active.active.number == 3)
        assert active.active.config.classes["batch"].priority == 0


async def test_a_guard_watches_the_points_that_are_stated():
    async with staged(SETTINGS, classes=CLASSES) as stage, dashboard(stage) as page:
        panel = await steering(page)
        await panel.get_by_label("Afterwards", exact=True).select_option(value="guard")
        await panel.get_by_label("Points of attainment", exact=True).fill("4.5")
        await tried(panel, CHANGE)
        await panel.get_by_role("button", name="Apply").click()
        await panel.get_by_text("Version 2 is in force").wait_for()
        # The guard would keep the change whatever these classes lose.
        few = panel.get_by_text("Not judged, with fewer than 20 requests in the time before: ")
        shown = await few.inner_text()
        assert all(name in shown for name in CLASSES)
        guard = stage.service.reconfiguration.guard.to_json()
        assert (guard["seconds"], guard["drop"], guard["is_temporary"]) == (3_600, 4.5, False)


async def test_what_is_wrong_is_named_and_not_applied():
    async with (
        staged(SETTINGS, classes=CLASSES) as stage,
        dashboard(stage, refused=(400, 412)) as page,
    ):
        panel, active = await steering(page), stage.service.reconfiguration
        await tried(panel, "classes: {batch: {priority: high}}")
        await panel.get_by_text("classes.batch.priority").wait_for()
        assert await panel.get_by_role("button", name="Apply").is_disabled()
        await tried(panel, "server: {port: 9}")
        await panel.get_by_text("Needs a restart", exact=True).wait_for()
        assert await panel.get_by_role("button", name="Apply").is_disabled()
        await tried(panel, CHANGE)
        await panel.get_by_text("classes.batch.priority: 0 → 3").wait_for()
        other = {"classes": {"batch": {"priority": 1}}}
        assert (await stage.http.put("/admin/config", json=other, headers=ADMIN)).status_code == 200
        await panel.get_by_role("button", name="Apply").click()
        await panel.locator(".refused", has_text="is in force; read it").wait_for()
        assert active.active.config.classes["batch"].priority == 1


async def test_a_hypothetical_request_is_decided():
    async with (
        staged(SETTINGS, classes=CLASSES) as stage,
        dashboard(stage, refused=(400,)) as page,
    ):
        panel = await steering(page)
        await panel.get_by_label("Model", exact=True).select_option(CHAT_MODEL)
        await panel.get_by_label("Tokens of the prompt or of each input", exact=True).fill("40")
        await panel.get_by_label("Longest output", exact=True).fill("20")
        await panel.get_by_label("Class", exact=True).select_option("batch")
        decide = panel.get_by_role("button", name="Decide")
        await decide.click()
        await panel.get_by_text("admitted", exact=True).wait_for()
        assert "0 waiting, 0 of them before it" in await panel.inner_text()
        await panel.get_by_label("Model", exact=True).select_option(EMBED_MODEL)
        await panel.get_by_label("Tokens of the prompt or of each input", exact=True).fill("9000000")
        await decide.click()
        await panel.locator(".refused", has_text="9,000,000").wait_for()


async def test_drain_asks_before_it_drains():
    async with staged(SETTINGS) as stage, dashboard(stage, refused=(503,)) as page:
        panel = await steering(page)
        await panel.get_by_role("button", name="Drain…").click()
        assert (await stage.http.get("/ready")).status_code == 200
        await panel.get_by_role("button", name="Drain now").click()
        await panel.get_by_text("Drained: no request runs.").wait_for()
        assert (await stage.http.get("/ready")).status_code == 503
