"""The dashboard's modules in Node, where `page_stub.mjs` stands in for the browser."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from controlplane.api.operations.dashboard import FOLDER
from controlplane.service.decision_log.log_rows import logged_history
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
    """
    shown = shown_by(tmp_path, script, request=logged_history(row))
    assert "30 tokens, predicted 40 (0.9 quantile 80)" in shown
    assert "NaN" not in shown and "bjective" not in shown
    embedding = {"kind": "embed", "input_tokens": [5]}
    row = {key: row[key] for key in row if key not in ("forecast", "output_tokens")} | embedding
    assert "Output" not in shown_by(tmp_path, script, request=logged_history(row))


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
        shown = given.answers.map((answer) => feed.take(answer) || feed.about.classes.gold.objectives_ms.ttft);
    """
    assert shown_by(tmp_path, script, answers=answers) == [500, 2_000, 2_000]


def test_an_answer_that_is_no_json_is_a_failure_and_leaves_nothing(tmp_path: Path) -> None:
    """As of a proxy that asks for a login with status 200."""
    sample = {"seq": 1, "at": 1.0, "type": "sample"}
    good = {"instance": "a", "now": 1.0, "next": 1, "more": False, "records": [sample]}
    script = """
        const { Feed } = await import("./feed.js");
        const answers = [given.good, "<!doctype html>"], failures = [];
        page.answer = () => answers.pop();
        const feed = new Feed(() => {}, (error) => failures.push(error.message));
        await feed.poll();
        await feed.poll();
        shown = [failures.length, Number.isFinite(feed.last.time)];
    """
    assert shown_by(tmp_path, script, good=good) == [1, True]


def test_a_server_that_hangs_is_a_failure(tmp_path: Path) -> None:
    script = """
        const { Feed } = await import("./feed.js");
        AbortSignal.timeout = () => AbortSignal.abort(new DOMException("signal timed out", "TimeoutError"));
        page.answer = (url, { signal }) => new Promise((_, fail) => signal?.aborted && fail(signal.reason));
        await new Feed(() => {}, (error) => { shown = error.message; }).poll();
    """
    assert shown_by(tmp_path, script) == "signal timed out"
