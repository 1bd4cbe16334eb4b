"""The decision log over HTTP: no text of requests, retries named, old requests explained from it."""

import gzip
from hashlib import sha256

from controlplane.api.settings import ApiSettings
from controlplane.service.decision_log.reader import read_log
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, RERANK_MODEL, WORDS, staged

MARKER = "zanzibar-4711-marker"
ADMIN = {"authorization": "Bearer root"}
SETTINGS = ApiSettings(admin_key_sha256=sha256(b"root").hexdigest())


def all_bytes(folder):
    found = b""
    for path in folder.iterdir():
        found += gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return found


async def test_no_text_of_a_request_reaches_the_log(tmp_path):
    async with staged(decision_log={"dir": str(tmp_path), "sample": 1}) as stage:
        post = stage.http.post
        chat = {
            "model": CHAT_MODEL,
            "messages": [{"role": "user", "content": f"say {MARKER}"}],
            "user": MARKER,
        }
        long = {"model": CHAT_MODEL, "prompt": f"{MARKER} " * 400}
        tool = {"type": "function", "function": {"name": MARKER, "parameters": {"type": "object"}}}
        answers = [
            await post("/v1/chat/completions", json=chat),
            await post("/v1/chat/completions", json={**chat, "stop": [MARKER], "metadata": {"a": MARKER}}),
            await post("/v1/chat/completions", json={**chat, "tools": [tool]}),
            await post("/v1/completions", json={"model": CHAT_MODEL, "prompt": MARKER, "max_tokens": 3}),
            await post("/v1/completions", json=long),
            await post("/v1/embeddings", json={"model": EMBED_MODEL, "input": [MARKER, f"{MARKER} b"]}),
            await post("/v1/embeddings", json={"model": MARKER, "input": MARKER}),
            await post("/v1/rerank", json={"model": RERANK_MODEL, "query": MARKER, "documents": [MARKER]}),
        ]
        assert [answer.status_code for answer in answers].count(200) >= 5
    text = all_bytes(tmp_path)
    rows = read_log(tmp_path).requests
    assert {row["model"] for row in rows} == {CHAT_MODEL, EMBED_MODEL, RERANK_MODEL}
    assert MARKER.encode() not in text
    assert not any(word.strip().encode() in text for word in WORDS if len(word) > 2)


async def test_rows_are_counted_and_old_requests_are_explained_from_the_log(tmp_path):
    sections = {"decision_log": {"dir": str(tmp_path), "sample": 1}, "server": {"explain_requests": 0}}
    async with staged(SETTINGS, **sections) as stage:
        body = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "hi"}]}
        for _ in range(2):
            await stage.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
        answer = await stage.http.get("/admin/explain/mine", headers=ADMIN)
        assert answer.status_code == 200, answer.text
        first, second = answer.json()["requests"]
        assert (first["outcome"], first["decisions"][0]["decision"]) == ("met", "ADMIT")
        assert first["decisions"][0]["memory"]["ceiling_bytes"] > 0
        one = await stage.http.get(f"/admin/explain/{second['id']}", headers=ADMIN)
        assert [each["id"] for each in one.json()["requests"]] == [second["id"]]
        none = await stage.http.get("/admin/explain/other", headers=ADMIN)
        assert none.status_code == 404
        assert "decision log" in none.json()["error"]["message"]
        metrics = (await stage.http.get("/metrics")).text
        assert 'tandem_decision_log_rows_total{what="dropped"} 0.0' in metrics
        assert 'tandem_decision_log_rows_total{what="written"} ' in metrics


async def test_a_retry_names_the_rejected_request_and_a_changed_configuration_is_logged(tmp_path):
    sections = {"decision_log": {"dir": str(tmp_path)}, "server": {}}
    async with staged(SETTINGS, **sections) as stage:
        service, headers = stage.service, {"x-request-id": "again"}
        body = {"model": EMBED_MODEL, "input": "x"}
        service.gate.is_closed = True
        assert (await stage.http.post("/v1/embeddings", json=body, headers=headers)).status_code == 503
        service.gate.is_closed = False
        assert (await stage.http.post("/v1/embeddings", json=body, headers=headers)).status_code == 200
        change = {"admission": {"max_waiting": 7}}
        assert (await stage.http.put("/admin/config", json=change, headers=ADMIN)).status_code == 200
    log = read_log(tmp_path)
    rejected, retry = log.requests
    assert (rejected["outcome"], retry["outcome"]) == ("rejected", "met")
    assert retry["retry_of"] == rejected["id"]
    assert "retry_of" not in rejected
    assert [row["version"] for row in log.configs] == [0, 1], log.configs
    assert log.configs[1]["config"]["admission"] == {"max_waiting": 7}
    assert log.configs[0]["hash"] != log.configs[1]["hash"]
