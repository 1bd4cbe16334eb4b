"""`tandem top` against a served application: its rows, `--once`, and the terminal application."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from threading import Event
from typing import Any

import pytest

from controlplane.cli import main
from controlplane.commands import top
from controlplane.commands.admin_api import KEY_VARIABLE
from controlplane.commands.live_view import LiveView, plain_text
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage, listening, staged

pytestmark = pytest.mark.long

# Longer than a column, and `tandem explain` needs all of it.
UNLUCKY = f"unlucky-{'0123456789' * 4}"
SERVER = {"admin_key_sha256": sha256(b"root").hexdigest()}
CLASSES = {
    "gold": {"default": True, "priority": 2, "ttft_ms": 10_000},
    "fast": {"ttft_ms": 0.001, "sheddable": False},
}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "root")


@asynccontextmanager
async def busy_server() -> AsyncIterator[tuple[Stage, str]]:
    """A server with one request that was served, one that missed, one rejected, and embeddings."""
    async with staged(server=SERVER, classes=CLASSES) as stage, listening(stage.app) as url:
        ask: dict[str, Any] = {"model": CHAT_MODEL, "prompt": "hello"}
        await stage.http.post("/v1/completions", json=ask, headers={"x-request-id": "served"})
        await stage.http.post("/v1/completions", json=ask | {"service_class": "fast"})
        await stage.http.post("/v1/embeddings", json={"model": EMBED_MODEL, "input": "a"})
        stage.service.gate.is_closed = True
        await stage.http.post("/v1/completions", json=ask, headers={"x-request-id": UNLUCKY})
        stage.service.gate.is_closed = False
        stage.service.live.sample()
        yield stage, url


async def run(*words: str) -> int:
    return await asyncio.to_thread(main, words)


async def test_once_prints_classes_memory_and_what_went_wrong(capsys):
    async with busy_server() as (_, url):
        assert await run("top", "--server", url, "--once") == 0
    lines = capsys.readouterr().out.splitlines()
    # Below "age" each row begins with the seconds since the event.
    assert [line.split()[0] for line in lines if line][:-3] == [
        "class", "gold", "fast", "memory", "LLM", "embeddings", "pool", "forecast", "first", "output",
        "engine", "embedding", "age",
    ]  # fmt: skip
    assert "66.7 % of 3" in lines[1] and "3.33" in lines[1]
    events = lines[-3:]
    assert "rejected" in events[0] and f" {UNLUCKY}-" in events[0] and "shutting down" in events[0]
    assert "late" in events[1] and "missed ttft" in events[1]
    assert "version 1" in events[2]


async def test_once_as_json_has_all_records(capsys):
    async with busy_server() as (_, url):
        assert await run("top", "--server", url, "--once", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sample"]["classes"]["gold"]["5m"]["ended"] == 3
    assert found["about"]["models"]["llm"] == [CHAT_MODEL]
    assert {"admission", "end", "rejection", "config"} == {event["type"] for event in found["events"]}


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--server", "http://127.0.0.1:9", "--once"], 1, "is the server running there?"),
        (["--server", "http://127.0.0.1:9", "--json"], 2, "--json: only with --once"),
    ],
)
async def test_errors_name_the_remedy(words, status, message, capsys):
    assert await run("top", *words) == status
    assert message in capsys.readouterr().err


async def test_without_textual_once_still_works(monkeypatch, capsys):
    monkeypatch.setattr(top, "find_spec", lambda name: None)
    async with busy_server() as (_, url):
        assert await run("top", "--server", url) == 2
        assert "pip install '.[top]'" in capsys.readouterr().err
        assert await run("top", "--server", url, "--once") == 0


async def test_a_restarted_server_begins_a_new_view():
    view = LiveView()
    answer = {"instance": "a", "next": 2, "now": 5.0, "more": False, "records": [
        {"seq": 1, "at": 1.0, "type": "sample"}, {"seq": 2, "at": 2.0, "type": "fault", "part": "p",
         "state": "began", "text": "t"},
    ]}  # fmt: skip
    assert not view.take(answer)
    assert (len(view.samples), len(view.events), view.next) == (1, 1, 2)
    assert view.take({**answer, "instance": "b", "records": []})
    assert (len(view.samples), len(view.events), view.next, view.instance) == (0, 0, 0, None)
    assert plain_text(view).startswith("class")


EVENTS: list[dict[str, Any]] = [
    {"type": "admission", "id": "r", "class": "c", "victims": 2, "wait_ms": 10.0},
    {"type": "deferral", "id": "r", "class": "c", "reason": "no_memory"},
    {"type": "rejection", "id": "r", "class": "c", "reason": "never_fits", "retry_after_ms": None},
    {"type": "preemption", "id": "r", "class": "c", "by": "gate", "for": None, "recompute_tokens": 9,
     "recompute_ms": 12.4, "freed_bytes": 2**21},
    {"type": "quota", "from": {"llm": 0, "embedding": 2**20}, "to": {"llm": 2**20, "embedding": 0},
     "moves": 3, "urgency": {"llm": 1.5, "embedding": 0.25}},
    {"type": "restart", "part": "engine", "model": "m", "state": "down", "text": "it died"},
    {"type": "config", "version": 2, "changes": {"log.level": ["info", "debug"]}},
    {"type": "config", "version": 2, "changes": {}, "guard": "rolled_back", "text": "class c lost 5 points"},
    {"type": "fault", "part": "quotas", "state": "began", "text": "they stand"},
]  # fmt: skip


def test_every_event_is_described():
    view = LiveView()
    records = [{"seq": n, "at": 100.0 - n, **event} for n, event in enumerate(EVENTS)]
    view.take({"instance": "a", "next": 9, "now": 100.0, "more": False, "records": records})
    rows = {row[1]: row[4] for row in view.event_rows(view.newest())}
    assert rows == {
        "admitted": "after preempting 2 predicted wait 10 ms",
        "deferred": "no memory now",
        "rejected": "larger than its quota can ever be, no retry can help",
        "preempted": "for waiting embeddings, 9 tokens to compute again in 12 ms, freed 2.0 MiB",
        "quota": "+1.0 MiB for LLM in 3 moves, urgency LLM 1.50, embeddings 0.25",
        "engine down": "it died",
        "version 2": "log.level: info -> debug",
        "version 2 rolled back": "class c lost 5 points",
        "fault began": "they stand",
    }


def sample(number: int, held: dict[str, int], **more: Any) -> dict[str, Any]:
    """A sample in which the LLM's leases of each class are `held`, and embeddings of `bulk` hold 1 MiB."""
    owner = {"quota_bytes": 2**23, "lent_bytes": 0, "held_bytes": 0, "running": 0, "waiting": 0}
    return {
        "seq": number, "at": float(number), "type": "sample", "pool_bytes": 2**24, "withheld_bytes": 2**20,
        "owners": {
            "llm": owner | {"held_by_class": held, "shared_prefix_bytes": 2**19},
            "embedding": owner | {"held_by_class": {"bulk": 2**20}, "shared_prefix_bytes": 0},
        },
        "classes": {name: {"running": 0, "waiting": 0} for name in ("gold", "bulk")},
        "device": {"llm": 0.5, "embedding": 0.25}, **more,
    }  # fmt: skip


def view_of(records: list[dict[str, Any]]) -> LiveView:
    view = LiveView()
    view.take({"instance": "a", "next": 99, "now": 100.0, "more": False, "records": records})
    return view


def test_memory_of_each_class_is_shown_over_time_at_one_scale():
    view = view_of([sample(n, {"gold": n * 2**20}) for n in range(5)])
    rows = {row[0]: row[-2:] for row in view.class_rows()}
    assert rows == {"gold": ("4.0 MiB", " ▂▄▆█"), "bulk": ("1.0 MiB", "▂▂▂▂▂")}
    long = view_of([sample(n, {"gold": 2**23 if n == 200 else 0}) for n in range(240)])
    line = long.class_rows()[0][-1]
    assert len(line) == 24 and line.strip() == "█" and line.index("█") == 20


def test_withheld_memory_shared_prefixes_and_calibration_are_text():
    calibration = {
        "ttft": {"coverage": {"gold": 0.88}, "error": {"gold": 0.0971}},
        "length": {"coverage": {"gold": 1.0}, "error": {"gold": 1200.04}},
        "embedding_load": {"coverage": {"0.9": 0.914}},
        "step_time": {"ratio": {"chat": 1.034}, "error": {"chat": 0.061}},
        "pass_time": {"ratio": {}, "error": {}},
    }
    view = view_of([sample(1, {}, calibration=calibration)])
    lines = plain_text(view).splitlines()
    assert "pool 16.0 MiB, shared prefixes 512.0 KiB, withheld 1.0 MiB" in lines
    assert view.calibration_rows() == [
        ("first token", "gold 88 % (97 ms)"),
        ("output length", "gold 100 % (1,200 tokens)"),
        ("embedding load", "quantile 0.9 91 %"),
        ("engine step", "chat 103 % of the forecast (6 %)"),
        ("embedding pass", "no outcome yet"),
    ]
    assert any(line.startswith("first token     gold 88 %") for line in lines)


def test_a_record_that_was_too_large_is_passed_over():
    large = {"at": 5.0, "left_out_bytes": 40_000}
    records = [sample(1, {}), {"seq": 2, "type": "sample"} | large, {"seq": 3, "type": "config"} | large]
    view = view_of(records)
    assert (view.sample["seq"], view.next) == (1, 99)
    assert plain_text(view).startswith("class")


def test_memory_that_is_lent_has_no_urgency():
    move = EVENTS[4] | {"seq": 1, "at": 1.0, "moves": 1, "urgency": {"llm": 0.0, "embedding": 0.0}}
    assert view_of([move]).event_rows([move])[0][4] == (
        "+1.0 MiB for LLM in one move, unused memory lent or taken back"
    )


@pytest.fixture
def top_app(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the application, which reads the feed only when a test says so."""
    pytest.importorskip("textual")
    from controlplane.commands import top_app

    monkeypatch.setattr(top_app, "_PERIOD_S", 3_600.0)
    return top_app


async def test_the_application_shows_what_the_feed_has(top_app):
    from textual.widgets import DataTable, Static

    async with busy_server() as (stage, url):
        options = argparse.Namespace(server=url, key_file=None)
        view = LiveView()
        await asyncio.to_thread(top.read, options, view)
        app = top_app.TopApp(
            view, lambda: top.read(options, view), lambda name: top.explanation(options, name), url
        )
        async with app.run_test(size=(140, 45)) as pilot:
            classes, events = app.query_one("#classes", DataTable), app.query_one("#events", DataTable)
            assert classes.row_count == 2 and events.row_count == 3
            assert str(classes.get_row_at(0)[0]) == "gold"
            await pilot.press("a")
            assert events.row_count > 3
            await pilot.press("a", "enter")
            await app.workers.wait_for_complete()
            await pilot.pause()
            (page,) = app.screen.query("#explanation Static")
            assert "REJECT  shutting_down: server is shutting down" in str(page.render())
            await pilot.press("escape", "down")
            stage.generator.die()
            stage.service.live.sample()
            app.poll()
            await app.workers.wait_for_complete()
            await pilot.pause()
            faults = app.query_one("#faults", Static)
            assert faults.display and "engine" in str(faults.render())
            # There are new first rows, and the cursor stays on its event.
            assert events.cursor_row > 1 and str(events.get_row_at(events.cursor_row)[1]) == "late"
            svg = app.export_screenshot()
            assert "gold" in svg and "Memory" in svg
            await pilot.press("space")
            assert "paused" in str(app.query_one("#title", Static).render())
            await pilot.press("q")
        await stage.generator.start()


async def test_reads_of_a_slow_server_do_not_overlap(top_app):
    begun, may_end, reads = Event(), Event(), []

    def read() -> None:
        reads.append(1)
        begun.set()
        assert may_end.wait(10)

    app = top_app.TopApp(LiveView(), read, str, "http://slow")
    async with app.run_test():
        slow = app.poll()
        assert await asyncio.to_thread(begun.wait, 10)
        second = app.poll()
        try:
            await asyncio.wait_for(second.wait(), 5)
            assert len(reads) == 1
        finally:
            may_end.set()
        await slow.wait()
        await app.poll().wait()
        assert len(reads) == 2


async def test_the_application_goes_on_without_an_answer(top_app):
    from textual.widgets import Static

    options = argparse.Namespace(server="http://127.0.0.1:9", key_file=None)
    view = LiveView()
    app = top_app.TopApp(view, lambda: top.read(options, view), str, options.server)
    async with app.run_test() as pilot:
        app.poll()
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "no answer" in str(app.query_one("#title", Static).render())
        assert app.query_one("#faults", Static).display
