"""The load report over HTTP: who gets it, what is in it, and that it follows the state of the box."""

import asyncio
from hashlib import sha256

import pytest

from controlplane.api.settings import ApiSettings
from controlplane.config import ConfigError
from controlplane.core.prefix_index import block_hashes
from controlplane.core.request import Owner
from controlplane.fleet.load_report import HEADER_LOAD, MAX_REPORT_BYTES, LoadReport, parse_report
from controlplane.service.gate.load_reporter import LoadReporter
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, RERANK_MODEL, staged, until

ROUTER = {"authorization": "Bearer router"}
ADMIN = {"authorization": "Bearer root"}
ROUTED = {"x-tandem-router-key": "router"}
SETTINGS = ApiSettings(
    admin_key_sha256=sha256(b"root").hexdigest(), router_key_sha256=sha256(b"router").hexdigest()
)
BODY = {"model": CHAT_MODEL, "prompt": "x"}


@pytest.mark.parametrize(("headers", "status"), [(ROUTER, 200), (ADMIN, 200), ({}, 401)])
async def test_routers_and_the_operator_may_read_the_load(headers: dict[str, str], status: int) -> None:
    async with staged(SETTINGS) as stage:
        assert (await stage.http.get("/admin/load", headers=headers)).status_code == status


async def test_the_key_of_the_routers_opens_nothing_else() -> None:
    async with staged(SETTINGS) as stage:
        assert (await stage.http.get("/admin/state", headers=ROUTER)).status_code == 401
        assert (await stage.http.post("/admin/drain", headers=ROUTER)).status_code == 401
    async with staged(ApiSettings(admin_key_sha256=SETTINGS.admin_key_sha256)) as stage:
        assert (await stage.http.get("/admin/load", headers=ROUTER)).status_code == 401


async def test_the_load_names_models_classes_and_owners_within_its_size() -> None:
    async with staged(SETTINGS) as stage:
        await stage.http.post("/v1/completions", json=BODY)
        text = (await stage.http.get("/admin/load", headers=ROUTER)).content
        assert len(text) <= MAX_REPORT_BYTES
        report = parse_report(text)
        assert {name: model.owner for name, model in report.models.items()} == {
            CHAT_MODEL: "llm",
            EMBED_MODEL: "embedding",
            RERANK_MODEL: "embedding",
        }
        assert report.owners.keys() == {"llm", "embedding"}
        classes = stage.service.config.service_classes().keys()
        assert report.owners["llm"].intercepts.keys() == classes
        ledger = stage.service.gate.dispatcher.ledger
        assert report.owners["llm"].free_bytes == ledger.ceiling(Owner.LLM)
        assert set(report.attainment.values()) <= {0.0, 1.0}
        assert len(report.attainment) == 1


async def test_only_answers_to_a_router_carry_the_load() -> None:
    async with staged(SETTINGS) as stage:
        routed = await stage.http.post("/v1/completions", json=BODY, headers=ROUTED)
        refused = await stage.http.post("/v1/completions", json={"model": "other"}, headers=ROUTED)
        wrong = await stage.http.post("/v1/completions", json=BODY, headers={"x-tandem-router-key": "x"})
        plain = await stage.http.post("/v1/completions", json=BODY)
        assert parse_report(routed.headers[HEADER_LOAD]).models.keys() >= {CHAT_MODEL}
        assert refused.status_code == 400
        assert HEADER_LOAD in refused.headers
        assert HEADER_LOAD not in wrong.headers
        assert HEADER_LOAD not in plain.headers
    async with staged() as stage:
        off = await stage.http.post("/v1/completions", json=BODY, headers=ROUTED)
        assert HEADER_LOAD not in off.headers


async def test_an_answer_is_given_without_a_load_that_cannot_be_reported(monkeypatch) -> None:
    def broken(reporter: LoadReporter) -> LoadReport:
        raise RuntimeError("no model")

    async with staged(SETTINGS) as stage:
        with monkeypatch.context() as patched:
            patched.setattr(LoadReporter, "report", broken)
            answer = await stage.http.post("/v1/completions", json=BODY, headers=ROUTED)
            assert (answer.status_code, HEADER_LOAD in answer.headers) == (200, False)
            faults = stage.service.status.faults()
            assert faults["load_report"] == "no load report can be made: no model"
            series = await stage.http.get("/metrics")
            assert series.status_code == 200
            assert "\ntandem_predicted_utilisation " not in series.text
        answer = await stage.http.post("/v1/completions", json=BODY, headers=ROUTED)
        assert (answer.status_code, HEADER_LOAD in answer.headers) == (200, True)
        assert "load_report" not in stage.service.status.faults()
        assert "\ntandem_predicted_utilisation 0.0\n" in (await stage.http.get("/metrics")).text


async def test_a_report_is_kept_for_a_moment_and_states_its_age() -> None:
    async with staged(SETTINGS) as stage:
        first = parse_report(stage.service.load_reporter.text())
        again = parse_report(stage.service.load_reporter.text())
        assert again.number == first.number
        assert 0 <= first.age <= again.age < 0.05
        fresh = stage.service.load_reporter.report()
        assert (fresh.number, fresh.epoch) == (first.number + 1, first.epoch)


async def test_waiting_requests_take_memory_slots_and_time() -> None:
    async with staged(SETTINGS, is_stepped=True, admission={"engine_queue": 0}) as stage:
        idle = stage.service.load_reporter.report()
        asking = [asyncio.create_task(stage.http.post("/v1/completions", json=BODY)) for _ in range(6)]
        await until(lambda: len(stage.service.gate.dispatcher.queued(Owner.LLM)) == 2)
        busy = stage.service.load_reporter.report()
        assert busy.owners["llm"].free_bytes < idle.owners["llm"].free_bytes
        assert busy.owners["embedding"] == idle.owners["embedding"]
        assert idle.utilisation == 0.0
        assert busy.utilisation == 1.0
        while not all(task.done() for task in asking):
            stage.generator.allow()
            await asyncio.sleep(0)


async def test_a_box_that_drains_and_a_model_whose_engine_or_worker_is_down_are_not_served() -> None:
    async with staged(SETTINGS) as stage:
        stage.generator.die()
        await until(lambda: stage.service.gate.outage(CHAT_MODEL) is not None)
        assert stage.service.load_reporter.report().models.keys() == {EMBED_MODEL, RERANK_MODEL}
        stage.embedder.die()
        assert stage.service.load_reporter.report().models.keys() == {RERANK_MODEL}
        await stage.service.drain()
        assert stage.service.load_reporter.report().models == {}


async def test_a_server_for_routers_does_not_start_with_names_that_do_not_fit_into_a_header() -> None:
    classes = {f"{'long-' * 20}{at}": {"ttft_ms": 100, "default": at == 0} for at in range(5)}
    with pytest.raises(
        ConfigError, match=r"server.router_key_sha256: the load report of 3 models and 5 classes"
    ):
        async with staged(classes=classes, server={"router_key_sha256": SETTINGS.router_key_sha256}):
            pass
    async with staged(classes=classes) as stage:
        assert len(stage.service.load_reporter.text()) > MAX_REPORT_BYTES


async def test_a_change_to_names_that_do_not_fit_into_a_header_is_refused() -> None:
    key = {"server": {"router_key_sha256": SETTINGS.router_key_sha256}}
    classes = {f"{'long-' * 20}{at}": {"ttft_ms": 100} for at in range(5)}
    rule = r"server.router_key_sha256: the load report of 3 models"
    async with staged(**key) as stage:
        with pytest.raises(ConfigError, match=rule):
            await stage.service.reconfiguration.change({"classes": classes}, source="test")
        assert len(stage.service.load_reporter.text()) <= MAX_REPORT_BYTES
    async with staged() as stage:
        await stage.service.reconfiguration.change({"classes": classes}, source="test")
        with pytest.raises(ConfigError, match=rule):
            await stage.service.reconfiguration.change(key, source="test")


async def test_a_flag_is_true_or_false() -> None:
    async with staged(SETTINGS) as stage:
        answer = await stage.http.get("/admin/load?prefixes=1", headers=ROUTER)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "prefixes='1': should be true or false"
        assert (await stage.http.get("/admin/load?tenants=false", headers=ROUTER)).status_code == 200


async def test_tokens_of_tenants_and_the_prefix_digest_are_given_on_demand() -> None:
    tenants = {"team": {"api_keys_sha256": [sha256(b"k").hexdigest()]}}
    async with staged(SETTINGS, tenants=tenants) as stage:
        await stage.http.post("/v1/completions", json={**BODY, "max_tokens": 3})
        text = (await stage.http.get("/admin/load?tenants=true&prefixes=true", headers=ROUTER)).content
        report = parse_report(text)
        assert sum(report.served_tokens.values()) == 4
        assert report.prefixes == {}
        plain = parse_report((await stage.http.get("/admin/load", headers=ROUTER)).content)
        assert plain.served_tokens == {}


def test_the_digest_is_made_of_block_hashes_that_a_router_can_make() -> None:
    assert block_hashes(range(48), 16) == block_hashes(list(range(48)), 16)
    assert block_hashes(range(32), 16)[0] == hash((0, *range(16)))
