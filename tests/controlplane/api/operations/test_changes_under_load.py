"""200 changes of the configuration under load: nothing is lost, and no decision mixes two versions."""

import asyncio
from collections import Counter
from hashlib import sha256
from typing import Any

import httpx
import pytest

from controlplane.api.body_parsing import BodyParser
from controlplane.core.clock import milliseconds
from controlplane.service.gate import dispatcher as dispatcher_module
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage, staged

KEYS = {"authorization": "Bearer root"}
DIGEST = sha256(b"root").hexdigest()
CHANGES, REQUESTS = 200, 300


def configured(number: int) -> dict[str, Any]:
    """Sections in which the number of the version occurs in every key that decisions depend on."""
    gold = {"default": True, "priority": number % 100, "sheddable": False}
    return {
        "classes": {"gold": {**gold, "ttft_ms": 60_000 + number, "e2e_ms": 120_000 + number}},
        "tenants": {"web": {"api_keys_sha256": [DIGEST], "requests_per_minute": 1e6 + number}},
        "admission": {"max_waiting": 1_000 + number, "engine_queue": number % 3},
        "scheduling": {
            "priority_head_start_ms": 1_000 + number,
            "engine": {"ordering": ("edf", "srmt")[number % 2], "urgency": number / 1_000},
        },
        "server": {"admin_key_sha256": DIGEST, "limits": {"max_answer_values": 100_000 + number}},
    }


async def ask(stage: Stage, index: int) -> httpx.Response:
    if index % 3:
        body = {"model": CHAT_MODEL, "prompt": "x" * (index % 50 + 1), "max_tokens": 3}
        return await stage.http.post("/v1/completions", json=body, headers=KEYS)
    return await stage.http.post(
        "/v1/embeddings", json={"model": EMBED_MODEL, "input": ["x"] * 3}, headers=KEYS
    )


async def test_nothing_is_lost_and_no_decision_mixes_versions(monkeypatch: pytest.MonkeyPatch):
    cycles: list[tuple[int, int, int]] = []
    run_cycle = dispatcher_module.run_cycle

    def recorded(view: Any, now: Any, admission: Any) -> Any:
        policies = stage.service.gate.dispatcher._policies
        head_start = policies.ordering.options.priority_head_start
        cycles.append((policies.version, admission.options.max_waiting, head_start))
        return run_cycle(view, now, admission)

    monkeypatch.setattr(dispatcher_module, "run_cycle", recorded)
    async with staged(**configured(1)) as stage:
        stage.generator._token_seconds = 0.002
        asking = []
        for number in range(2, CHANGES + 2):
            # Begun by the number of the change and not by time, so that requests meet many versions.
            asked = len(asking), (number - 1) * REQUESTS // CHANGES
            asking += [asyncio.create_task(ask(stage, index)) for index in range(*asked)]
            answer = await stage.http.put("/admin/config", json=configured(number), headers=KEYS)
            assert (answer.status_code, answer.json()["version"]) == (200, number), answer.text
            await asyncio.sleep(0.002)
        assert Counter([(await task).status_code for task in asking]) == {200: REQUESTS}
        ended = stage.service.gate.dispatcher.recorder.kept
        assert len(ended) == REQUESTS
        assert {most - 1_000 for _, most, _ in cycles} == {version for version, _, _ in cycles}
        for version, most, head_start in cycles:
            assert (most, head_start) == (1_000 + version, milliseconds(1_000 + version))
        arrived: set[int] = set()
        for ticket in ended:
            slo, service_class = ticket.request.slo, ticket.request.service_class
            number = round(slo.ttft / 1e6) - 60_000
            arrived.add(number)
            assert slo.e2e == milliseconds(120_000 + number)
            assert service_class.priority == number % 100
            assert all(event.version >= number for event in ticket.history)
        assert len(arrived) > 20
        assert stage.generator.options["urgency"] == (CHANGES + 1) / 1_000
        assert stage.service.reconfiguration.active.number == CHANGES + 1


async def test_a_request_keeps_the_version_that_it_began_with(monkeypatch: pytest.MonkeyPatch):
    parse, may_parse, begun = BodyParser.parse, asyncio.Event(), asyncio.Event()

    async def slow(self: BodyParser, *arguments: Any, **options: Any) -> Any:
        begun.set()
        await may_parse.wait()
        return await parse(self, *arguments, **options)

    async with staged(**configured(1)) as stage:
        monkeypatch.setattr(BodyParser, "parse", slow)
        asking = asyncio.create_task(ask(stage, 1))
        await begun.wait()
        classes = {"gold": None, "silver": {"default": True}}
        change = {"classes": classes, "server": {"limits": {"max_answer_values": 1, "max_depth": 1}}}
        answer = await stage.http.put("/admin/config", json=change, headers=KEYS)
        assert answer.status_code == 200, answer.text
        may_parse.set()
        assert (await asking).status_code == 200
        (ticket,) = stage.service.gate.dispatcher.recorder.kept
        assert ticket.request.service_class.name == "gold"
        assert [event.version for event in ticket.history] == [2]
