"""What an operator sees and changes while requests run."""

import asyncio
from hashlib import sha256

import pytest

from controlplane.api.settings import ApiSettings
from controlplane.core.ports import Refused
from controlplane.core.request import Owner
from tests.controlplane.api.stage import CHAT_MODEL, staged, until

ADMIN = {"authorization": "Bearer root"}
SETTINGS = ApiSettings(admin_key_sha256=sha256(b"root").hexdigest())


async def test_policies_change_while_requests_wait():
    sections = {"admission": {"engine_queue": 0}, "scheduling": {"ordering": "fcfs"}}
    async with staged(SETTINGS, is_stepped=True, **sections) as stage:
        body = {"model": CHAT_MODEL, "prompt": "x"}
        asking = [asyncio.create_task(stage.http.post("/v1/completions", json=body)) for _ in range(6)]
        await until(lambda: stage.service.dispatcher.waiting(Owner.LLM) == 2)
        change = {"admission": {"engine_queue": 1}, "scheduling": {"ordering": "least-slack"}}
        answer = await stage.http.put("/admin/config", json=change, headers=ADMIN)
        assert answer.status_code == 200
        assert answer.json()["scheduling"]["ordering"] == "least-slack"
        assert answer.json() == (await stage.http.get("/admin/config", headers=ADMIN)).json()
        assert stage.service.dispatcher.waiting(Owner.LLM) == 1
        while not all(task.done() for task in asking):
            stage.generator.allow()
            await asyncio.sleep(0)
        assert [task.result().status_code for task in asking] == [200] * 6


async def test_the_engine_is_told_what_changed():
    async with staged(SETTINGS, scheduling={"engine": {"ordering": "edf"}}) as stage:
        change = {"scheduling": {"engine": {"ordering": "srmt", "urgency": 0.25}, "patience_ms": 5_000}}
        answer = await stage.http.put("/admin/config", json=change, headers=ADMIN)
        assert answer.json()["scheduling"]["engine"] == {"ordering": "srmt", "urgency": 0.25}
        assert stage.generator.options == {"ordering": "srmt", "urgency": 0.25, "patience_ms": 5_000}


async def test_an_engine_that_dies_while_it_is_told_is_told_to_the_operator():
    async with staged(SETTINGS, scheduling={"engine": {"ordering": "edf"}}) as stage:
        before = (await stage.http.get("/admin/config", headers=ADMIN)).json()

        async def die():
            stage.generator.die()

        stage.generator.on_order = die
        change = {"scheduling": {"engine": {"ordering": "srmt"}}}
        answer = await stage.http.put("/admin/config", json=change, headers=ADMIN)
        assert answer.status_code == 503
        assert "neither it nor the gate was changed" in answer.json()["error"]["message"]
        assert (await stage.http.get("/admin/config", headers=ADMIN)).json() == before


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ([], "a mapping of admission and scheduling is needed"),
        ({"server": {"port": 1}}, "server: not changeable while the service runs"),
        ({"scheduling": {"ordering": "lifo"}}, "choose one of edf, fcfs, least-slack"),
        ({"scheduling": {"orderin": "edf"}}, "did you mean 'ordering'?"),
        ({"scheduling": {"engine": {}}}, "scheduling.engine: not changeable"),
        ({"admission": {"lengths": "max-tokens"}}, "admission.lengths: not changeable"),
        ({"admission": {"max_waiting": -1}}, "admission.max_waiting=-1"),
    ],
)
async def test_a_change_that_cannot_be_changes_nothing(change, expected):
    async with staged(SETTINGS) as stage:
        before = (await stage.http.get("/admin/config", headers=ADMIN)).json()
        answer = await stage.http.put("/admin/config", json=change, headers=ADMIN)
        assert answer.status_code == 400
        assert expected in answer.json()["error"]["message"]
        assert (await stage.http.get("/admin/config", headers=ADMIN)).json() == before


async def test_quotas_that_stand_still_are_told_where_an_operator_looks():
    quota = {"policy": "dynamic", "llm": {"nominal": 0.7, "min": 0.3}, "embedding": {"nominal": 0.3}}
    async with staged(SETTINGS, scheduling={"engine": {}}, quota=quota | {"tick_ms": 10_000}) as stage:
        assert (await stage.http.get("/ready")).json() == {"status": "ready"}
        stage.service.quotas.trouble.met(Refused("no such quota"))
        ready = await stage.http.get("/ready")
        assert ready.status_code == 200
        assert ready.json() == {"status": "ready", "impaired": {"quotas": "refused"}}
        told = (await stage.http.get("/admin/state", headers=ADMIN)).json()["sharing"]["trouble"]
        assert told == {"fault": "refused", "message": "no such quota", "failures": {"refused": 1}}
        assert 'tandem_quota_failures{fault="refused"} 1.0' in (await stage.http.get("/metrics")).text


async def test_an_operator_drains_it_before_ending_it():
    async with staged(SETTINGS, is_stepped=True) as stage:
        body = {"model": CHAT_MODEL, "prompt": "x"}
        running = asyncio.create_task(stage.http.post("/v1/completions", json=body))
        await stage.generator.until_runs(1)
        draining = asyncio.create_task(stage.http.post("/admin/drain", headers=ADMIN))
        await until(lambda: stage.service.dispatcher.is_closed)
        late = await stage.http.post("/v1/completions", json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        ready = await stage.http.get("/ready")
        assert ready.status_code == 503
        assert "was drained" in ready.json()["error"]["message"]
        assert not draining.done()
        stage.generator.allow(3)
        assert (await running).status_code == 200
        assert (await draining).json() == {"status": "drained"}
        assert (await stage.http.get("/health")).status_code == 200
        assert (await stage.http.post("/admin/drain", headers=ADMIN)).json() == {"status": "drained"}


async def test_only_the_operator_may_look_and_change():
    async with staged(SETTINGS) as stage:
        assert (await stage.http.post("/admin/drain")).status_code == 401
        assert (await stage.http.get("/admin/config")).status_code == 401
        assert (await stage.http.put("/admin/config", json={})).status_code == 401
        answer = await stage.http.put("/admin/config", content=b"{", headers=ADMIN)
        assert answer.json()["error"]["code"] == "invalid_json"
