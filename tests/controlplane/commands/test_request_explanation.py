"""`tandem explain` prints what /admin/explain/ID answers, in words."""

import asyncio
import json
import re
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from backends.testing.scripted import Script
from controlplane.cli import main
from controlplane.commands.admin_api import KEY_VARIABLE
from controlplane.commands.request_explanation import REASONS, _print_request
from controlplane.core.decision import Reason
from controlplane.service.decision_log.log_rows import logged_history
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    MAX_RUNNING,
    at_a_slow_pace,
    listening,
    staged,
    until,
)

SECTIONS = {
    "server": {"admin_key_sha256": sha256(b"root").hexdigest()},
    "classes": {
        "interactive": {"priority": 5, "ttft_ms": 3_000, "default": True},
        "batch": {"sheddable": False},
    },
    "admission": {"engine_queue": 0, "max_waiting": 1},
}


def test_every_reason_has_the_dashboards_words():
    page = Path("controlplane/api/dashboard/format.js").read_text(encoding="utf-8")
    stated = re.search(r"REASONS = {(.*?)};", page, re.DOTALL)
    assert stated is not None
    assert dict(re.findall(r'(\w+): "(.*)"', stated[1])) == REASONS
    assert REASONS.keys() == set(Reason)


@pytest.mark.long
async def test_a_preemption_and_a_rejection_are_explained(monkeypatch, capsys):
    monkeypatch.setenv(KEY_VARIABLE, "root")
    async with staged(is_stepped=True, **SECTIONS) as stage, listening(stage.app) as url:
        stage.generator.default = Script(tokens=200)

        def ask(name: str, service_class: str, tokens: int) -> asyncio.Task:
            body = {"model": CHAT_MODEL, "prompt": "Hello", "max_tokens": tokens}
            headers = {"x-request-id": name, "x-service-class": service_class}
            return asyncio.create_task(stage.http.post("/v1/completions", json=body, headers=headers))

        async def explain(*words: str) -> str:
            assert await asyncio.to_thread(main, ["explain", *words, "--server", url]) == 0
            return capsys.readouterr().out

        batch = [ask(f"batch-{n}", "batch", 200) for n in range(MAX_RUNNING)]
        await stage.generator.until_runs(MAX_RUNNING)
        await at_a_slow_pace(stage)
        asked = [*batch, ask("urgent", "interactive", 3)]
        async with asyncio.timeout(10):
            await stage.generator.until_runs(MAX_RUNNING + 1)
        asked += [ask(f"late-{n}", "batch", 200) for n in range(3)]
        await until(lambda: any(task.done() for task in asked))
        async with asyncio.timeout(10):
            while not all(task.done() for task in asked):
                stage.generator.allow()
                await asyncio.sleep(0)

        rejected = await explain(
            f"late-{next(n for n in range(3) if asked[-3 + n].result().status_code == 429)}"
        )
        assert ": rejected\n  generate, class batch, tenant" in rejected
        assert "REJECT  queue_full: queue is full; 4 running" in rejected
        victim = next(
            text for text in [await explain(f"batch-{n}") for n in range(MAX_RUNNING)] if "PREEMPTED" in text
        )
        assert re.search(r"PREEMPTED by the gate for urgent-\d+; \d+ tokens to compute again", victim)
        assert re.search(r"objectives: ttft 3000 ms\n.*(DEFER  no_slot|ADMIT)", await explain("urgent"))
        found = json.loads(await explain("urgent", "--json"))
        assert [request["request"]["class"] for request in found["requests"]] == ["interactive"]
        assert await asyncio.to_thread(main, ["explain", "nobody", "--server", url]) == 2
        assert "neither open nor among the last" in capsys.readouterr().err
        state = await stage.http.get("/admin/state", headers={"authorization": "Bearer root"})
        windows = state.json()["classes"]["batch"]
        assert windows.keys() == {"5m", "1h"} and windows["1h"]["met"] < windows["1h"]["ended"]
        pytest.importorskip("rich")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.stdout, "isatty", lambda: True)
            patch.setenv("COLUMNS", "160")
            table = re.sub(r"\x1b\[[0-9;]*m", "", await explain("urgent"))
            assert re.search(r"ms +decision +basis *\n *[\d,.]+ +(DEFER +no_slot: no free slot|ADMIT)", table)


async def test_a_request_of_the_decision_log_is_explained(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(KEY_VARIABLE, "root")
    sections = SECTIONS | {"decision_log": {"dir": str(tmp_path)}}
    sections["server"] = {**SECTIONS["server"], "explain_requests": 0}
    async with staged(**sections) as stage, listening(stage.app) as url:
        headers = {"x-request-id": "old"}
        await stage.http.post("/v1/embeddings", json={"model": EMBED_MODEL, "input": "x"}, headers=headers)
        assert await asyncio.to_thread(main, ["explain", "old", "--server", url]) == 0
    shown = capsys.readouterr().out
    assert ": met\n  embed, class interactive, tenant" in shown
    assert "1 prompt tokens; objectives: ttft" in shown and "ADMIT" in shown


def test_a_preemption_of_the_decision_log_is_explained_without_its_cost(capsys):
    preempted = {"decision": "PREEMPTED", "by": "gate", "for": "urgent-1", "at_ms": 7.0}
    row = {
        "id": "a-1", "at": 0, "outcome": "met", "kind": "generate", "class": "batch", "model": "m",
        "tenant": "t", "prompt_tokens": 5, "max_output_tokens": 9, "decisions": [preempted],
    }  # fmt: skip
    _print_request(logged_history(row, {}))
    assert "7.0 ms  PREEMPTED by the gate for urgent-1\n" in capsys.readouterr().out


async def test_a_hypothetical_request_is_decided_and_a_drained_server_refuses_it(monkeypatch, capsys):
    monkeypatch.setenv(KEY_VARIABLE, "root")
    async with staged(**SECTIONS) as stage, listening(stage.app) as url:

        async def tandem(*words: str) -> tuple[int, str]:
            status = await asyncio.to_thread(main, [*words, "--server", url])
            captured = capsys.readouterr()
            return status, captured.out + captured.err

        size = ("--model", CHAT_MODEL, "--tokens", "150")
        status, text = await tandem("explain", *size, "--max-tokens", "40", "--class", "batch")
        assert status == 0 and "ADMIT  0 running, free slots" in text and "predicted wait" in text
        assert "generate, class batch, 150 prompt tokens\n  queue: 0 other requests" in text
        _, text = await tandem("explain", "--model", EMBED_MODEL, "--tokens", "20", "--inputs", "3", "--json")
        assert json.loads(text)["request"]["prompt_tokens"] == 60
        for words in ((), ("--model", CHAT_MODEL), ("some-id", "--tokens", "3"), ("some-id", *size)):
            status, text = await tandem("explain", *words)
            assert status == 2 and "give either the id of a request, or --model and --tokens" in text
        assert not stage.service.gate.tickets()
        assert await tandem("drain") == (
            0, "drained: no request runs; only a restart of the server admits requests again\n",
        )  # fmt: skip
        status, text = await tandem("explain", *size)
        assert status == 1 and "503: the server is shutting down" in text
