"""Changes of the configuration over HTTP, while requests run."""

import asyncio
from hashlib import sha256
from typing import Any

import pytest
import yaml

from controlplane.core.decision import Outcome
from controlplane.core.request import Owner
from controlplane.service.runtime.change_guard import GuardState
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    MODELS,
    Stage,
    staged,
    until,
)

ADMIN = {"authorization": "Bearer root"}
DIGEST = sha256(b"root").hexdigest()
SERVER = {"admin_key_sha256": DIGEST}
TENANT_DIGEST = sha256(b"tenant").hexdigest()
PROMPT = {"model": CHAT_MODEL, "prompt": "x"}


async def get(stage: Stage) -> dict[str, Any]:
    answer = await stage.http.get("/admin/config", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    assert answer.headers["etag"] == answer.json()["etag"]
    return answer.json()


async def put(stage: Stage, change: object, status: int = 200, *, query: str = "", **headers: str) -> Any:
    headers = {**ADMIN, **{name.replace("_", "-"): value for name, value in headers.items()}}
    answer = await stage.http.put(f"/admin/config{query}", json=change, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


async def test_policies_change_while_requests_wait():
    sections = {"admission": {"engine_queue": 0}, "scheduling": {"ordering": "fcfs"}}
    async with staged(server=SERVER, is_stepped=True, **sections) as stage:
        asking = [asyncio.create_task(stage.http.post("/v1/completions", json=PROMPT)) for _ in range(6)]
        await until(lambda: len(stage.service.gate.dispatcher.queued(Owner.LLM)) == 2)
        change = {"admission": {"engine_queue": 1}, "scheduling": {"ordering": "least-slack"}}
        answer = await put(stage, {**change, "quota": {"dead_band": 0.01}})
        assert (answer["version"], answer["dry_run"], answer["unchanged"]) == (2, False, ["quota.dead_band"])
        assert answer["applied"] == {
            "admission.engine_queue": {"from": 0, "to": 1},
            "scheduling.ordering": {"from": "fcfs", "to": "least-slack"},
        }
        assert (await get(stage))["config"]["scheduling"]["ordering"] == "least-slack"
        assert len(stage.service.gate.dispatcher.queued(Owner.LLM)) == 1
        while not all(task.done() for task in asking):
            stage.generator.allow()
            await asyncio.sleep(0)
        assert [task.result().status_code for task in asking] == [200] * 6
        ended = stage.service.gate.dispatcher.recorder.kept
        assert {event.version for ticket in ended for event in ticket.history} == {1, 2}


async def test_change_is_sent_to_the_engine():
    async with staged(server=SERVER, scheduling={"engine": {"ordering": "edf"}}) as stage:
        engine = {"ordering": "srmt", "urgency": 0.75}
        await put(stage, {"scheduling": {"engine": engine, "default_deadline_ms": 5_000}})
        assert (await get(stage))["config"]["scheduling"]["engine"] == {"ordering": "srmt", "urgency": 0.75}
        assert stage.generator.options == {"ordering": "srmt", "urgency": 0.75, "default_deadline_ms": 5_000}
        answer = await put(stage, {"scheduling": {"engine": {"urgency": None}}})
        assert answer["applied"] == {"scheduling.engine.urgency": {"from": 0.75, "to": None}}
        assert (await get(stage))["config"]["scheduling"]["engine"] == {"ordering": "srmt"}


async def test_an_integer_beyond_64_bits_is_shown():
    async with staged(server=SERVER, scheduling={"options": {"seed": 2**70}}) as stage:
        assert (await get(stage))["config"]["scheduling"]["options"] == {"seed": 2**70}


async def test_engine_that_dies_during_a_change_is_reported():
    async with staged(server=SERVER, scheduling={"engine": {"ordering": "edf"}}) as stage:
        before = await get(stage)

        async def die():
            stage.generator.die()

        stage.generator.on_order = die
        error = await put(stage, {"scheduling": {"engine": {"ordering": "srmt"}}}, 503)
        assert "neither the engine nor the gate was changed" in error["message"]
        after = await get(stage)
        assert "neither the engine" in after["last_failure"]["error"]
        assert {**after, "last_failure": None} == before


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ([], "should be a mapping, a whole configuration or a part of one"),
        ({"scheduling": {"ordering": "lifo"}}, "choose one of edf, fcfs, least-slack"),
        ({"scheduling": {"orderin": "edf"}}, "did you mean 'ordering'?"),
        ({"admission": {"max_waiting": -1}}, "admission.max_waiting=-1"),
        # The value cannot be written as JSON.
        ({"admission": {"max_waiting": "1" * 20}}, "should be less than or equal to 1000000000"),
        ({"classes": {"standard": None}}, "exactly one class is the default"),
        ({"admission": {"max_waiting": 5}, "classes": {"standard": {"ttft_ms": -1}}}, "ttft_ms=-1"),
        ({"tenants": {"t": {"api_keys_sha256": ["***1"]}}}, "should be the hash of the key"),
        ({"server": {"metrics_key_sha256": "***"}}, "stands for a secret that is set, and none is"),
        ({"models": {"chat": {"model": CHAT_MODEL, "nmae": "x"}}}, "did you mean 'name'?"),
        ("admission", "should be a mapping"),
    ],
)
async def test_invalid_change_changes_nothing_and_is_shown(change, expected):
    async with staged(server=SERVER) as stage:
        before = await get(stage)
        assert expected in (await put(stage, change, 400))["message"]
        after = await get(stage)
        assert (after["last_failure"]["source"], before["last_failure"]) == ("PUT /admin/config", None)
        assert expected in after["last_failure"]["error"]
        assert {**after, "last_failure": None} == before
        await put(stage, {"admission": {"max_waiting": 5}})
        assert (await get(stage))["last_failure"] is None


async def test_keys_that_need_a_restart_are_reported_and_the_others_applied():
    async with staged(server=SERVER) as stage:
        change = {
            "server": {"port": 1, "drain_ms": 5},
            "admission": {"length_predictor": "max-tokens"},
            "scheduling": {"engine": "off", "victims": "latest-started"},
            "quota": {"llm": {"nominal": 0.5}},
        }
        answer = await put(stage, change)
        assert answer["applied"] == {"server.drain_ms": {"from": 30_000.0, "to": 5.0}}
        assert answer["unchanged"] == ["scheduling.victims"]
        assert {key: found["reason"] for key, found in answer["needs_restart"].items()} == {
            "server.port": "the server listens before it takes requests",
            "admission.length_predictor": "the predictor is built at the start",
            "scheduling.engine": "the engine is started with its scheduler",
            "quota.llm.nominal": "the engines were started with static quotas",
        }
        now = (await get(stage))["config"]
        assert (now["server"]["port"], now["scheduling"]["engine"]) == (8000, {})


async def test_a_stale_change_is_refused():
    async with staged(server=SERVER) as stage:
        first = (await get(stage))["etag"]
        second = (await put(stage, {"admission": {"max_waiting": 5}}, if_match=first))["etag"]
        assert second != first
        error = await put(stage, {"admission": {"max_waiting": 6}}, 412, if_match=first)
        assert error["code"] == "stale_version" and second in error["message"]
        assert (await get(stage))["config"]["admission"]["max_waiting"] == 5
        await put(stage, {"admission": {"max_waiting": 6}}, if_match=f"{first}, {second}")
        await put(stage, {"admission": {"max_waiting": 7}}, if_match="*")


async def test_a_dry_run_says_what_would_change_and_changes_nothing():
    async with staged(server=SERVER) as stage:
        before = await get(stage)
        answer = await put(stage, {"admission": {"max_waiting": 5}}, query="?dry_run=true")
        assert answer["applied"] == {"admission.max_waiting": {"from": 1_000, "to": 5}}
        assert (answer["dry_run"], answer["version"]) == (True, 1)
        await put(stage, {"admission": {"max_waiting": -1}}, 400, query="?dry_run=true")
        assert await get(stage) == before


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?dryrun=true", "unknown query parameter"),
        ("?dry_run=yes", "should be true or false"),
        ("?guard_ms=0", "should be a number from 1"),
        ("?guard_ms=nan", "should be a number from 1"),
        ("?drop=3", "only with guard_ms or for_ms"),
        ("?for_ms=0", "should be a number from 1"),
        ("?for_ms=86400001", "should be a number from 1 to 8.64e"),
        ("?for_ms=3600001&drop=3", "should be a number from 1 to 3.6e"),
        ("?for_ms=5&guard_ms=5", "not with guard_ms"),
    ],
)
async def test_wrong_options_apply_nothing(query, expected):
    async with staged(server=SERVER) as stage:
        assert expected in (await put(stage, {"admission": {"max_waiting": 5}}, 400, query=query))["message"]
        assert (await get(stage))["version"] == 1


async def test_what_is_read_can_be_sent_back_with_masked_secrets():
    tenants = {"web": {"api_keys_sha256": [sha256(b"old").hexdigest(), TENANT_DIGEST]}}
    engine = {"hf_token": "hf_secret", "max_num_batched_tokens": 64}
    models = {**MODELS, "chat": {"model": CHAT_MODEL, "engine": engine}}
    async with staged(server=SERVER, tenants=tenants, models=models) as stage:
        found = await get(stage)
        config = found["config"]
        assert DIGEST not in str(found) and TENANT_DIGEST not in str(found) and "hf_secret" not in str(found)
        assert config["server"]["admin_key_sha256"] == "***"
        assert config["tenants"]["web"]["api_keys_sha256"] == ["***1", "***2"]
        assert config["models"]["chat"]["engine"] == {"hf_token": "***", "max_num_batched_tokens": 64}
        answer = await put(stage, config)
        assert (answer["version"], answer["applied"], answer["needs_restart"]) == (1, {}, {})
        assert "models.chat.engine.hf_token" in answer["unchanged"]
        # Without the first key; the second one keeps its tenant.
        config["tenants"]["web"]["api_keys_sha256"] = ["***2"]
        answer = await put(stage, config)
        assert answer["applied"] == {
            "tenants.web.api_keys_sha256": {"from": ["***1", "***2"], "to": ["***1"]},
        }
        for key, status in (("tenant", 200), ("old", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await stage.http.get("/v1/models", headers=headers)).status_code == status


async def test_a_whole_configuration_resets_what_it_leaves_out():
    classes = {"gold": {"default": True}, "batch": {"ttft_ms": 900}}
    async with staged(server=SERVER, classes=classes, admission={"max_waiting": 9}) as stage:
        whole = (await get(stage))["config"]
        answer = await put(stage, {"models": whole["models"], "server": {"admin_key_sha256": "***"}})
        assert answer["applied"]["admission.max_waiting"] == {"from": 9, "to": 1_000}
        assert answer["applied"]["classes.batch.ttft_ms"] == {"from": 900.0, "to": None}
        assert answer["applied"]["classes.standard.sheddable"] == {"from": None, "to": False}
        assert answer["needs_restart"] == {}
        assert sorted((await get(stage))["config"]["classes"]) == ["standard"]


async def test_yaml_is_accepted_within_bounds():
    async with staged(server=SERVER) as stage:

        async def send(text: bytes) -> Any:
            headers = {**ADMIN, "content-type": "application/yaml"}
            return await stage.http.put("/admin/config", content=text, headers=headers)

        answer = await send(yaml.safe_dump({"scheduling": {"engine": {"ordering": "edf"}}}).encode())
        assert answer.json()["applied"] == {"scheduling.engine.ordering": {"from": None, "to": "edf"}}
        laughs = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
            f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
            for old, new in zip("abcdef", "bcdefg", strict=True)
        )
        for text, status, expected in (
            (b"a: [", 400, "not YAML"),
            (b"\xff", 400, "not UTF-8"),
            (laughs.encode(), 400, "more than 100,000 values"),
            (b"admission: {max_waiting: 1, max_waiting: 2}", 400, "occurs twice"),
            (b"#" * 2**19, 413, "at most 262,144 are parsed"),
        ):
            answer = await send(text)
            assert (answer.status_code, expected in answer.text) == (status, True), answer.text


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"admission":' * 200 + b"1" + b"}" * 200])
async def test_a_change_is_bounded_like_other_bodies(body: bytes):
    async with staged(server=SERVER) as stage:
        answer = await stage.http.put("/admin/config", content=body, headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "body_too_complex")


async def test_classes_and_tenants_change_at_once():
    async with staged(server=SERVER) as stage:
        tenant = {"api_keys_sha256": [TENANT_DIGEST], "classes": ["gold"], "requests_per_minute": 1}
        change = {"classes": {"gold": {"ttft_ms": 60_000, "priority": 7}}, "tenants": {"web": tenant}}
        answer = await put(stage, change)
        assert list(answer["applied"]) == [
            "classes.gold.default", "classes.gold.priority", "classes.gold.sheddable", "classes.gold.ttft_ms",
            "tenants.web.api_keys_sha256", "tenants.web.classes", "tenants.web.requests_per_minute",
        ]  # fmt: skip
        assert (await stage.http.post("/v1/completions", json=PROMPT)).status_code == 401
        headers = {"authorization": "Bearer tenant"}
        assert (await stage.http.post("/v1/completions", json=PROMPT, headers=headers)).status_code == 200
        (ticket,) = stage.service.gate.dispatcher.recorder.kept
        assert (ticket.request.service_class.name, ticket.request.service_class.priority) == ("gold", 7)
        refused = await stage.http.post("/v1/completions", json=PROMPT, headers=headers)
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        metrics = (await stage.http.get("/metrics")).text
        assert 'tandem_requests_total{class="gold"' in metrics and "\ntandem_config_version 2.0\n" in metrics
        await put(stage, {"tenants": {"web": None}, "classes": {"gold": None}})
        assert (await stage.http.post("/v1/completions", json=PROMPT)).status_code == 200
        wrong = {**PROMPT, "service_class": "gold"}
        answer = await stage.http.post("/v1/completions", json=wrong)
        assert answer.json()["error"]["code"] == "unknown_service_class"


async def test_limits_change_at_once():
    async with staged(server=SERVER) as stage:
        limits = {"max_body": 200, "max_depth": 3, "max_answer_values": 10}
        await put(stage, {"server": {"limits": limits, "explain_requests": 1}})
        long = await stage.http.post("/v1/completions", json={**PROMPT, "prompt": "x" * 200})
        assert (long.status_code, long.json()["error"]["code"]) == (413, "request_too_large")
        many = await stage.http.post("/v1/completions", json={**PROMPT, "n": 4, "max_tokens": 3})
        assert "server.limits.max_answer_values is 10" in many.json()["error"]["message"]
        for _ in range(2):
            assert (await stage.http.post("/v1/completions", json=PROMPT)).status_code == 200
        assert len(stage.service.gate.dispatcher.recorder.kept) == 1


async def test_quotas_change_where_they_move():
    async with staged(server=SERVER, pool={"kv_allocator": "kvcached"}) as stage:
        controller = stage.service.quota_controller
        pool = controller.pool.memory.pool_bytes
        answer = await put(stage, {"quota": {"llm": {"nominal": 0.5}, "embedding": {"nominal": 0.5}}})
        assert sorted(answer["applied"]) == ["quota.embedding.nominal", "quota.llm.nominal"]
        assert controller.pool.sharing.nominal[Owner.LLM] <= pool // 2
        stage.generator.max_model_tokens = 10**9
        error = await put(stage, {"quota": {"llm": {"min": 0.1}}, "admission": {"max_waiting": 5}}, 400)
        assert "it would never start" in error["message"]
        assert stage.service.config.admission.max_waiting == 1_000
        stage.generator.max_model_tokens = 256
        answer = await put(stage, {"quota": {"tick_ms": 100}})
        assert list(answer["needs_restart"]) == ["quota.tick_ms"]


async def test_rollback_puts_an_earlier_version_in_force():
    async with staged(server=SERVER) as stage:

        async def roll_back(query: str = "", status: int = 200, **headers: str) -> Any:
            answer = await stage.http.post(f"/admin/config/rollback{query}", headers={**ADMIN, **headers})
            assert answer.status_code == status, answer.text
            return answer.json()

        first = (await get(stage))["hash"]
        for most in (5, 6):
            await put(stage, {"admission": {"max_waiting": most}})
        answer = await roll_back("?dry_run=true")
        assert answer["applied"] == {"admission.max_waiting": {"from": 6, "to": 5}}
        assert (await roll_back())["version"] == 4
        assert (await get(stage))["config"]["admission"]["max_waiting"] == 5
        answer = await roll_back("?version=1")
        assert (answer["version"], answer["hash"]) == (5, first)
        assert [each["version"] for each in (await get(stage))["versions"]] == [1, 2, 3, 4, 5]
        missing = await roll_back("?version=9", 400)
        assert "this server has the versions 1, 2, 3, 4, 5" in missing["error"]["message"]
        await roll_back(status=412, **{"if-match": '"1-0"'})


async def test_a_temporary_change_ends_by_itself_unless_another_one_follows():
    part = {"admission": {"max_waiting": 5}}
    async with staged(server=SERVER) as stage:
        await put(stage, part, query="?for_ms=60")
        assert (await get(stage))["guard"]["is_temporary"] and stage.service.config.admission.max_waiting == 5
        await until(lambda: stage.service.reconfiguration.active.number == 3)
        assert stage.service.config.admission.max_waiting == 1_000
        found = await get(stage)
        assert (found["guard"]["state"], found["guard"]["reason"]) == ("expired", "the change was for 0.06 s")
        await put(stage, part, query="?for_ms=60000")
        await put(stage, {"admission": {"max_waiting": 6}})
        assert (await get(stage))["guard"]["state"] == "superseded"
        assert stage.service.config.admission.max_waiting == 6


async def test_a_guarded_change_is_undone_if_a_class_loses_too_much():
    async with staged(server=SERVER) as stage:
        recorder, now = stage.service.gate.dispatcher.recorder, stage.service.gate.clock.now

        def end(count: int, outcome: Outcome) -> None:
            for _ in range(count):
                recorder.attainment.count("standard", outcome, now())

        end(100, Outcome.MET)
        change = {"admission": {"max_waiting": 5}}
        await put(stage, change, query="?guard_ms=60000&drop=3", x_tandem_source="tandem apply")
        guard = (await get(stage))["guard"]
        assert (guard["state"], guard["before"]["standard"]) == (
            "watching",
            {"percent": 100.0, "requests": 100},
        )
        await put(stage, {"admission": {"max_waiting": 6}})
        assert (await get(stage))["guard"]["state"] == "superseded"
        await put(stage, change, query="?guard_ms=600&drop=3")
        end(30, Outcome.LATE)
        await until(lambda: stage.service.reconfiguration.guard.state is not GuardState.WATCHING)
        found = await get(stage)
        assert found["guard"]["state"] == "rolled_back"
        assert "class standard lost 100.0 points" in found["guard"]["reason"]
        await until(lambda: stage.service.config.admission.max_waiting == 6)
        versions = (await get(stage))["versions"]
        assert [each["source"] for each in versions] == [
            "start", "tandem apply", "PUT /admin/config", "PUT /admin/config", "guard",
        ]  # fmt: skip
        feed = (await stage.http.get("/admin/live", headers=ADMIN)).json()["records"]
        changes = [(one["version"], one.get("guard")) for one in feed if one["type"] == "config"]
        assert changes == [
            (1, None), (2, None), (2, "superseded"), (3, None), (4, None), (5, None), (4, "rolled_back"),
        ]  # fmt: skip
        assert "class standard lost 100.0 points" in feed[-1]["text"]


async def test_the_configuration_needs_the_admin_key():
    async with staged(server=SERVER) as stage:
        assert (await stage.http.get("/admin/config")).status_code == 401
        assert (await stage.http.put("/admin/config", json={})).status_code == 401
        assert (await stage.http.post("/admin/config/rollback")).status_code == 401
        answer = await stage.http.put("/admin/config", content=b"{", headers=ADMIN)
        assert answer.json()["error"]["code"] == "invalid_json"
