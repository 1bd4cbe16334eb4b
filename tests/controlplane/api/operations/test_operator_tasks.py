"""Every command of docs/operator-tasks.md, in its order, on a served application with scripted engines."""

import asyncio
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from backends.testing.scripted import Script
from benchmark_control_plane.experiments.gate.operator_tasks import commands_by_task
from controlplane.cli import main
from controlplane.commands import config_changes
from controlplane.commands.admin_api import KEY_VARIABLE
from tests.controlplane.api.operations.test_admin import ADMIN, SETTINGS
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    MAX_RUNNING,
    Stage,
    at_a_slow_pace,
    listening,
    staged,
    until,
)

PAGE = Path(__file__).resolve().parents[4] / "docs/operator-tasks.md"
SECTIONS: dict[str, Any] = {
    "classes": {
        "interactive": {"priority": 5, "ttft_ms": 3_000, "default": True},
        "batch": {"sheddable": False},
    },
    "admission": {"engine_queue": 0, "max_waiting": 1},
}
# Quotas move only where the engine has Tandem's scheduler, and there the gate preempts no request.
MOVING: dict[str, Any] = {
    "pool": {"kv_allocator": "kvcached"},
    "quota": {"llm": {"nominal": 0.7}, "embedding": {"nominal": 0.3}, "tick_ms": 10_000},
}
PARTS = {
    "my-quota.yaml": "quota: {llm: {nominal: 0.65}, embedding: {nominal: 0.35}}",
    "my-pacing.yaml": "scheduling: {engine: {decode_pacing: 0.9}}",
    "my-class.yaml": "classes: {batch: {ttft_ms: 60000}}",
}

STATIC: dict[str, Any] = {"scheduling": {"engine": {"decode_pacing": 0.8}}}
# The tasks for which quotas move, and the part for which they do not.
_OF_QUOTAS, _OF_STATIC = ("3", "4"), "3, with static quotas"

pytestmark = pytest.mark.long


async def overloaded(stage: Stage) -> tuple[str, str]:
    """Sends requests of which one is rejected and one is preempted; returns the ids of both."""
    stage.generator.default = Script(tokens=40)

    def ask(name: str, service_class: str, tokens: int) -> asyncio.Task[Any]:
        body = {"model": CHAT_MODEL, "prompt": "Hello", "max_tokens": tokens}
        headers = {"x-request-id": name, "x-service-class": service_class}
        return asyncio.create_task(stage.http.post("/v1/completions", json=body, headers=headers))

    batch = {f"batch-{n}": ask(f"batch-{n}", "batch", 40) for n in range(MAX_RUNNING)}
    await stage.generator.until_runs(MAX_RUNNING)
    await at_a_slow_pace(stage)
    urgent = ask("urgent", "interactive", 3)
    await stage.generator.until_runs(MAX_RUNNING + 1)
    late = {f"late-{n}": ask(f"late-{n}", "batch", 40) for n in range(3)}
    await until(lambda: any(task.done() for task in late.values()))
    async with asyncio.timeout(10):
        while not all(task.done() for task in (*batch.values(), urgent, *late.values())):
            stage.generator.allow()
            await asyncio.sleep(0)
    rejected = next(name for name, task in late.items() if task.result().status_code == 429)
    for name in batch:
        explained = (await stage.http.get(f"/admin/explain/{name}", headers=ADMIN)).json()["requests"][0]
        if any(decision["decision"] == "PREEMPTED" for decision in explained["decisions"]):
            return rejected, name
    raise AssertionError("no request was preempted")


async def output(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints; `tandem` runs in this process."""
    if command.startswith("tandem "):
        words = [str(folder / word) if word in PARTS else word for word in shlex.split(command)[1:]]
        assert await asyncio.to_thread(main, words) == 0, command
        return capsys.readouterr().out
    shell = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE, cwd=folder)
    printed, _ = await shell.communicate()
    assert shell.returncode == 0, command
    return printed.decode()


async def test_the_commands_of_the_page_answer_the_ten_tasks(tmp_path, monkeypatch, capsys):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    monkeypatch.setenv(KEY_VARIABLE, "root")
    monkeypatch.setattr(config_changes, "_POLL_S", 0.01)
    for name, text in PARTS.items():
        assert text in PAGE.read_text(encoding="utf-8")
        (tmp_path / name).write_text(text, encoding="utf-8")
    async with (
        staged(SETTINGS, is_stepped=True, **SECTIONS) as stage,
        listening(stage.app) as url,
        staged(SETTINGS, **MOVING) as moving,
        listening(moving.app) as moving_url,
        staged(SETTINGS, **STATIC) as static,
        listening(static.app) as static_url,
    ):
        urls = {**dict.fromkeys(_OF_QUOTAS, moving_url), _OF_STATIC: static_url}
        rejected, victim = await overloaded(stage)
        printed: dict[str, list[str]] = {}
        for task, commands in commands_by_task(PAGE.read_text(encoding="utf-8")).items():
            for server in (stage, moving):
                server.service.live.sample()
            printed[task] = []
            for command in commands:
                here = command.replace("http://127.0.0.1:8000", urls.get(task, url))
                here = here.replace("--guard 5m", "--guard 300ms").replace("guard_ms=300000", "guard_ms=300")
                here = here.replace("explain ID", f"explain {rejected}").replace("VICTIM", victim)
                here = here.replace("explain/ID", f"explain/{rejected}")
                printed[task].append(await output(here, tmp_path, capsys))
    numbers = [str(number) for number in range(1, 11)]
    assert list(printed) == [*numbers[:3], _OF_STATIC, *numbers[3:]]
    assert_reasons_are_found(printed)
    assert_changes_are_made(printed)


def assert_reasons_are_found(printed: dict[str, list[str]]) -> None:
    """Tasks 1, 2, 5, 6, 7 and 9, which only ask."""
    refused, explained = printed["1"]
    assert "REJECT  queue_full: queue is full" in refused
    assert json.loads(explained)["requests"][0]["decisions"][-1]["reason"] == "queue_full"
    top, state = printed["2"]
    burn = json.loads(state)["classes"]["batch"]["5m"]["burn"]
    assert burn > 1 and re.search(rf"^batch .* {burn:.2f} ", top, re.MULTILINE)
    preempted, explained = printed["5"]
    assert re.search(r"PREEMPTED by the gate for urgent-\d+", preempted)
    assert "PREEMPTED" in [each["decision"] for each in json.loads(explained)["requests"][0]["decisions"]]
    top, limit = printed["6"]
    assert "of quota" in top and "device time" in top
    names = {line.partition("{")[0].partition(" ")[0] for line in limit.splitlines()}
    assert names == {
        "tandem_device_seconds_total", "tandem_held_bytes", "tandem_predicted_utilisation",
        "tandem_quota_bytes",
    }  # fmt: skip
    words, dry_run = printed["7"]
    assert words.startswith("ADMIT  ") and "generate, class interactive, 150 prompt tokens" in words
    assert json.loads(dry_run)["decision"] == "ADMIT"
    top, forecast = printed["9"]
    assert json.loads(top)["sample"]["calibration"].keys() >= {"ttft", "length"}
    assert "tandem_ttft_forecast_coverage" in forecast


def assert_changes_are_made(printed: dict[str, list[str]]) -> None:
    """Tasks 3, 4, 8 and 10, which change something, and what came of it."""
    dry, quota, more = printed["3"]
    assert "would be applied:" in dry and "needs a restart" not in dry
    assert "quota.embedding.nominal: 0.3 -> 0.35" in quota and "undone by the server after 3600 s" in quota
    assert "quota.llm.nominal" in json.loads(more)["applied"]
    dry, pacing, more = printed[_OF_STATIC]
    assert "would be applied:" in dry and "needs a restart" not in dry
    assert "scheduling.engine.decode_pacing: 0.8 -> 0.9" in pacing
    assert "undone by the server after 3600 s" in pacing
    assert json.loads(more)["applied"] == {"scheduling.engine.decode_pacing": {"from": 0.9, "to": 0.95}}
    top, config = printed["4"]
    assert "version 2" in top and "quota.llm.nominal: 0.7 -> 0.65" in top
    found = json.loads(config)
    sources = ["start", "tandem apply", "PUT /admin/config"]
    assert [version["source"] for version in found["versions"]] == sources
    assert (found["guard"]["state"], found["guard"]["is_temporary"]) == ("watching", True)
    guarded, undone, put, rolled = printed["8"]
    # Few requests end in this test.
    assert "not judged, with fewer than 20 requests in the time before: " in guarded
    assert "kept: no class was judged, with fewer than 20 requests" in guarded
    assert "classes.batch.ttft_ms: 60000.0 -> null" in undone
    assert "classes.batch.ttft_ms" in json.loads(put)["applied"]
    assert "classes.batch.ttft_ms" in json.loads(rolled)["applied"]
    words, drained, ready = printed["10"]
    assert words.startswith("drained: no request runs")
    assert json.loads(drained) == {"status": "drained"} and ready == "503"


async def test_with_static_quotas_pacing_is_changed_for_a_time_and_quotas_need_a_restart():
    async with staged(SETTINGS, **STATIC) as stage:

        async def put(query: str, change: dict[str, Any]) -> dict[str, Any]:
            answer = await stage.http.put(f"/admin/config{query}", json=change, headers=ADMIN)
            assert answer.status_code == 200, answer.text
            return answer.json()

        shares = {"llm": {"nominal": 0.65}, "embedding": {"nominal": 0.35}}
        refused = await put("?dry_run=true", {"quota": shares})
        assert refused["needs_restart"].keys() == {"quota.llm.nominal", "quota.embedding.nominal"}
        changed = await put("?for_ms=60", {"scheduling": {"engine": {"decode_pacing": 0.9}}})
        assert changed["applied"].keys() == {"scheduling.engine.decode_pacing"}
        assert stage.generator.options["decode_pacing"] == 0.9
        await until(lambda: stage.service.reconfiguration.active.number == 3)
        assert stage.generator.options["decode_pacing"] == 0.8
