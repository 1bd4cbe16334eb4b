"""The dashboard's modules in Node, where `page_stub.mjs` stands in for the browser."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from controlplane.api.operations.dashboard import FOLDER
from controlplane.service.decision_log.log_rows import logged_history
from tests.controlplane.api.operations.test_admin import SETTINGS
from tests.controlplane.api.scripted_server import CHAT_MODEL, staged
from tests.programs import required

STUB = Path(__file__).with_name("page_stub.mjs")


def shown_by(folder: Path, script: str, **given: object) -> Any:
    """What `script` leaves in `shown`; it sees the arguments as `given`, and the modules beside it."""
    for file in (STUB, *sorted(path for path in Path(str(FOLDER)).iterdir() if path.suffix == ".js")):
        shutil.copy(file, folder)
    (folder / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    end = "console.log(JSON.stringify(shown));\nprocess.exit(0);\n"
    lines = ['import "./page_stub.mjs";', f"const given = {json.dumps(given)};", "let shown;", script, end]
    (folder / "script.js").write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        [required("node"), "script.js"], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Opens the page, which reads `given.answers` in turn; `answered(n)` waits until it has shown n of them.
PAGE = """
    const waiting = [...given.answers];
    page.answer = () => waiting.shift() ?? new Promise(() => {});
    await import("./dashboard.js");
    const board = page.part("board");
    const answered = async (count) => {
      while (board.dataset.answers !== count) await new Promise((resolve) => setTimeout(resolve, 1));
    };
"""
TABLES = """
    const { Feed } = await import("./feed.js");
    const { Tables } = await import("./tables.js");
    const feed = new Feed(() => {}, () => {}), tables = new Tables(feed, { focus: null });
"""


async def test_the_page_shows_what_a_server_sends(tmp_path: Path) -> None:
    async with staged(SETTINGS, classes={"gold": {"ttft_ms": 60_000, "default": True}}) as stage:
        sent = {"model": CHAT_MODEL, "prompt": "x"}
        await stage.http.post("/v1/completions", json=sent)
        stage.service.gate.is_closed = True
        await stage.http.post("/v1/completions", json=sent, headers={"x-request-id": "late"})
        stage.service.gate.is_closed = False
        stage.service.live.sample()
        answers = [json.loads(stage.service.live.since(0, "a"))]
        classes = {"gold": None, "silver": {"default": True}}
        await stage.service.reconfiguration.change({"classes": classes}, source="test")
        stage.service.live.sample()
        answers.append(json.loads(stage.service.live.since(answers[0]["next"], "a")))
    script = f"""{PAGE}
        const ids = ["state", "models", "classes", "charts", "tables"];
        const texts = () => ids.map((id) => page.part(id).textContent);
        await answered(1);
        shown = [texts()];
        page.part("classes").children[0].click();
        await answered(2);
        shown.push(texts());
    """
    before, after = shown_by(tmp_path, script, answers=answers)
    state, models, classes, charts, tables = before
    assert state == "live" and CHAT_MODEL in models
    assert "gold" in classes and "50.0 %" in classes and "of 2 in 5 min" in classes
    assert "LLM quota" in charts and "before lending" in charts and "target90 %" in charts
    assert "server is shutting down" in tables and "Nothing was preempted." in tables
    # The class that was chosen is gone, and with it the button that would show all again.
    assert "gold" not in after[2] and "silver" in after[2] and "silver" in after[3]


def test_rows_and_faults_that_are_shown_stay_and_keep_the_focus(tmp_path: Path) -> None:
    """Replaced each second, they lost the keyboard's focus and the selected text."""

    def answer(seq: int, **record: object) -> dict[str, object]:
        records = [{"seq": seq, "at": float(seq), **record}]
        return {"instance": "a", "now": float(seq), "next": seq, "more": False, "records": records}

    about = {"target": 0.9, "models": {}, "classes": {"gold": {}}}
    sample = {"type": "sample", "faults": {"engine m": "it is down"}, "classes": {}}
    refused = {"type": "rejection", "class": "gold", "reason": "queue_full", "retry_after_ms": None}
    answers = [
        {**answer(1, id="r-1", **refused), "about": about},
        answer(2, **sample), answer(3, **sample), answer(4, id="r-2", **refused), answer(5, **sample),
    ]  # fmt: skip
    script = (
        TABLES
        + """
        const rows = page.part("tables").querySelector('[id="rows-decisions"]');
        const next = () => {
          feed.take(given.answers.shift());
          tables.update();
          return rows.querySelectorAll("a");
        };
        next();
        const [link] = next();
        link.focus();
        const [same] = next();
        next();
        const [newest, kept] = next();
        shown = [same === link, newest.href, kept.href, document.activeElement === kept];
    """
    )
    assert shown_by(tmp_path, script, answers=answers) == [True, "#explain=r-2", "#explain=r-1", True]
    script = f"""{PAGE}
        await answered(2);
        const [fault] = page.part("faults").children;
        await answered(3);
        shown = [fault.textContent, fault === page.part("faults").children[0]];
    """
    assert shown_by(tmp_path, script, answers=answers) == ["engine mit is down", True]


def rows_shown(tmp_path: Path, panel: str, records: list[dict[str, object]], shown: str) -> list[str]:
    """`shown` of the rows of a panel of tables, a JavaScript expression, after one answer with `records`."""
    about = {"target": 0.9, "models": {}, "classes": {"gold": {}}}
    last = {"now": float(len(records)), "next": len(records), "more": False}
    answer = {"instance": "a", **last, "records": records, "about": about}
    script = f"""{TABLES}
        feed.take(given.answer);
        tables.update();
        const rows = page.part("tables").querySelector('[id="rows-{panel}"]').children;
        shown = {shown};
    """
    found: list[str] = shown_by(tmp_path, script, answer=answer)
    return found


def test_a_preemption_names_who_got_the_memory(tmp_path: Path) -> None:
    """By the engine's scheduler it may be a request, too."""
    common = {"type": "preemption", "id": "v", "class": "gold", "recompute_tokens": 5, "recompute_ms": 1.0}
    both = [
        {**common, "seq": 1, "at": 1.0, "by": "engine", "for": "urgent-1", "for_class": "gold"},
        {**common, "seq": 2, "at": 2.0, "by": "engine", "for": None, "for_class": None},
        {**common, "seq": 3, "at": 3.0, "by": "gate", "for": None, "for_class": None},
        {"seq": 4, "at": 4.0, "type": "sample", "classes": {}},
    ]
    shown = 'rows.slice(1).map((row) => row.textContent.split("for ")[1])'
    gate, running, urgent = rows_shown(tmp_path, "preemptions", both, shown)
    assert gate.startswith("waiting embeddings") and running.startswith("the running requests")
    assert urgent.startswith("urgent-1gold")


def test_the_end_of_a_guard_is_shown_as_a_change_of_the_configuration(tmp_path: Path) -> None:
    ended = {"type": "config", "version": 2, "changes": {}}
    records = [
        {**ended, "seq": 1, "at": 1.0, "guard": "kept", "text": "no class lost more than 3 points"},
        {**ended, "seq": 2, "at": 2.0, "guard": "rolled_back", "text": "class gold lost 5 points"},
        {"seq": 3, "at": 3.0, "type": "sample", "classes": {}},
    ]
    shown = "rows.map((row) => row.textContent)"
    undone, kept = rows_shown(tmp_path, "happenings", records, shown)
    assert "version 2 rolled back" in undone and "class gold lost 5 points" in undone
    assert "version 2 kept" in kept and "no class lost more than 3 points" in kept


def test_a_request_of_the_decision_log_is_explained_without_what_its_row_lacks(tmp_path: Path) -> None:
    row = {
        "id": "a-1", "at": 0, "outcome": "met", "kind": "generate", "class": "batch", "model": "m",
        "tenant": "t", "prompt_tokens": 5, "max_output_tokens": 90, "output_tokens": 30, "e2e_ms": 400.0,
        "forecast": [1, 10, 40, 80, 90], "decisions": [{"decision": "ADMIT", "at_ms": 0.1}],
    }  # fmt: skip
    script = """
        const { route } = await import("./explain.js");
        location.hash = "#explain=a";
        page.answer = () => ({ requests: [given.request] });
        await route();
        shown = page.part("explain").textContent;
        const link = document.createElement("a");
        link.setAttribute("href", "#explain=a");
        page.part("tables").append(link);
        location.hash = "";
        await route();
        if (document.activeElement !== link) throw new Error("the focus is not where it was");
    """
    shown = shown_by(tmp_path, script, request=logged_history(row, {"e2e_ms": 700}))
    assert "30 tokens, predicted 40 (0.9 quantile 80)" in shown
    assert "NaN" not in shown and "700 ms" in shown
    embedding = {"kind": "embed", "input_tokens": [5]}
    row = {key: row[key] for key in row if key not in ("forecast", "output_tokens")} | embedding
    assert "Output" not in shown_by(tmp_path, script, request=logged_history(row, {"e2e_ms": 700}))


def test_the_page_takes_classes_and_models_of_a_new_version(tmp_path: Path) -> None:
    def about(**objectives: float) -> dict[str, object]:
        return {"target": 0.9, "models": {"llm": ["m"]}, "classes": {"gold": {"objectives_ms": objectives}}}

    head = {"instance": "a", "now": 1.0, "more": False}
    change = {"seq": 2, "at": 1.0, "type": "config", "version": 2, "changes": {}, "about": about(ttft=2_000)}
    answers = [
        {**head, "next": 1, "records": [], "about": about(ttft=500)},
        {**head, "next": 2, "records": [change]},
        {**head, "next": 2, "records": []},
    ]
    script = """
        const { Feed } = await import("./feed.js");
        const feed = new Feed(() => {}, () => {});
        const stated = () => feed.about.classes.gold.objectives_ms.ttft;
        shown = given.answers.map((answer) => feed.take(answer) || stated());
    """
    assert shown_by(tmp_path, script, answers=answers) == [500, 2_000, 2_000]


def test_an_answer_that_is_no_json_is_a_failure_and_leaves_nothing(tmp_path: Path) -> None:
    """As of a proxy that asks for a login with status 200; nor does a record that was too large."""
    sample = {"seq": 1, "at": 1.0, "type": "sample"}
    large = {"seq": 2, "at": 2.0, "type": "sample", "left_out_bytes": 40_000}
    good = {"instance": "a", "now": 2.0, "next": 2, "more": False, "records": [sample, large]}
    script = """
        const { Feed } = await import("./feed.js");
        const answers = [given.good, "<!doctype html>"], failures = [];
        page.answer = () => answers.pop();
        const feed = new Feed(() => {}, (error) => failures.push(error.message));
        await feed.poll();
        await feed.poll();
        shown = [failures.length, feed.last.seq, Number.isFinite(feed.last.time)];
    """
    assert shown_by(tmp_path, script, good=good) == [1, 1, True]


def test_a_server_that_hangs_is_a_failure(tmp_path: Path) -> None:
    script = """
        const { Feed } = await import("./feed.js");
        AbortSignal.timeout = () => AbortSignal.abort(new DOMException("signal timed out", "TimeoutError"));
        page.answer = (url, { signal }) => new Promise((_, fail) => signal?.aborted && fail(signal.reason));
        await new Feed(() => {}, (error) => { shown = error.message; }).poll();
    """
    assert shown_by(tmp_path, script) == "signal timed out"


def test_a_text_that_was_edited_while_another_was_tried_is_not_applied(tmp_path: Path) -> None:
    plan = {"applied": {"log.level": {"from": "info", "to": "debug"}}, "needs_restart": {}, "etag": "1"}
    script = """
        const { Steering } = await import("./steer.js");
        const panel = page.part("steer");
        panel.hidden = true;
        new Steering({ about: { models: {}, classes: {} } });
        page.part("steer-open").click();
        const text = panel.querySelector("textarea");
        const [tries, applies] = ["Try", "Apply"].map((name) =>
          panel.querySelectorAll("button").find((one) => one.textContent === name));
        const tried = async (edit) => {
          let answer;
          page.answer = () => new Promise((resolve) => { answer = resolve; });
          const trying = tries.click();
          if (edit) text.listeners.input();
          answer(given.plan);
          await trying;
          return applies.disabled;
        };
        shown = [await tried(false), await tried(true)];
    """
    assert shown_by(tmp_path, script, plan=plan) == [False, True]


def test_a_server_that_starts_is_no_fault_and_its_stages_are_shown(tmp_path: Path) -> None:
    """It was shown as a missing answer, above an empty page."""
    failure = {"message": "the server is starting (loading m for 2.0 s)", "code": "starting"}
    answers = [
        {"status": 503, "error": failure},
        {"status": 503, "error": {"message": "no", "code": "other"}},
    ]
    script = """
        const waiting = [...given.answers];
        page.answer = () => waiting.shift() ?? new Promise(() => {});
        await import("./dashboard.js");
        const [state, starting, stages] = ["state", "starting", "stages"].map(page.part);
        const changed = async (text) => {
          while (state.textContent === text) await new Promise((resolve) => setTimeout(resolve, 1));
        };
        const look = () => [state.dataset.state, state.textContent, starting.hidden, stages.textContent];
        await changed("");
        shown = [look()];
        await changed("starting");
        shown.push(look());
    """
    assert shown_by(tmp_path, script, answers=answers) == [
        ["wait", "starting", False, failure["message"]],
        ["bad", "no answer: no", True, failure["message"]],
    ]
