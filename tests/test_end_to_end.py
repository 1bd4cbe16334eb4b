"""The complete service: the command line, real engines and the real OpenAI client."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import yaml

from benchmark_control_plane.common.servers import Server, free_port, serving
from benchmark_control_plane.experiments.gate.overload import CONFIG, overload
from controlplane.sdk import Tandem

pytestmark = pytest.mark.engine

ORDERED = {
    # Requests that the engine has not started in this time are evicted.
    "admission": {**CONFIG.get("admission", {}), "max_wait_ms": 20_000},
    "scheduling": {"engine": {"ordering": "edf", "look_ahead": "none"}},
    "server": {"admin_key_sha256": sha256(b"root").hexdigest()},
}
TEXTS = ["A queue forms where arrivals outpace service.", "Memory is what runs out first."]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests: a small pool, three classes, both kinds of model, the engine plug-in."""
    folder = tmp_path_factory.mktemp("service")
    config = folder / "service.yaml"
    config.write_text(yaml.safe_dump(CONFIG | ORDERED), encoding="utf-8")
    port = free_port()
    command = [sys.executable, "-m", "controlplane.cli", "serve", str(config), "--port", str(port)]
    with serving(Server("tandem", command, port, "/ready"), folder / "log") as found:
        yield found


@pytest.fixture(scope="module")
def url(server):
    return server.url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_buffered_and_streamed_chat_agree(client):
    asked = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.usage.completion_tokens == 24
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 24


def test_embeddings_are_those_of_the_model(client):
    from sentence_transformers import SentenceTransformer

    from backends.bundled_models import MINILM, resolve

    model = SentenceTransformer(resolve(MINILM), device="cpu")
    answer = client.embeddings.create(model="minilm", input=TEXTS)
    assert np.allclose([row.embedding for row in answer.data], model.encode(TEXTS), atol=1e-5)
    model.max_seq_length = 6
    # On a busy machine the predictor may forecast after the first response that the default SLO is missed.
    patient = {"truncate_prompt_tokens": 6, "service_class": "batch"}
    cut = client.embeddings.create(model="minilm", input=TEXTS, extra_body=patient)
    assert np.allclose([row.embedding for row in cut.data], model.encode(TEXTS), atol=1e-5)
    assert cut.usage.prompt_tokens == 12


def test_log_probabilities_of_a_prompt_are_those_of_generating_it(client, url):
    ids = httpx.post(f"{url}/tokenize", json={"prompt": "A queue forms."}).json()["tokens"]
    asked = {"model": "tiny-llama", "temperature": 0, "logprobs": 1}
    read = client.completions.create(prompt=ids, max_tokens=0, echo=True, **asked)
    found = read.choices[0].logprobs
    assert (len(found.tokens), read.usage.completion_tokens) == (len(ids), 0)
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    next_token = client.completions.create(prompt=ids[:-1], max_tokens=1, **asked).choices[0].logprobs
    assert max(found.top_logprobs[-1].values()) == pytest.approx(next_token.token_logprobs[0], abs=0.05)


def test_response_has_the_decision(url):
    body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-service-class": "interactive"})
    assert answer.headers["x-tandem-decision"] == "ADMIT"
    assert float(answer.headers["x-tandem-queue-ms"]) >= 0
    assert answer.headers["x-request-id"]


def test_the_sdk_streams_and_embeds(url):
    with Tandem(url) as tandem:
        assert tandem.chat("Hello", model="tiny-llama", max_tokens=8, ttft_ms=60_000).text
        assert "".join(tandem.stream("Hello", model="tiny-llama", max_tokens=8))
        assert len(tandem.embed(TEXTS, model="minilm").vectors) == 2


def test_client_that_disconnects_mid_stream_frees_its_memory(url):
    body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
    before = metric(url, 'tandem_requests_total{class="standard",kind="generate",outcome="aborted"}')
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
        next(answer.iter_bytes())
    # The next request is decided after the abort was noticed.
    httpx.post(f"{url}/v1/completions", json={**body, "stream": False, "max_tokens": 300}, timeout=60)
    after = metric(url, 'tandem_requests_total{class="standard",kind="generate",outcome="aborted"}')
    assert after == before + 1
    assert metric(url, "tandem_held_bytes") == 0


async def complete(http: httpx.AsyncClient, service_class: str, max_tokens: int, **headers: str) -> int:
    body = {"model": "tiny-llama", "prompt": "x" * 60, "max_tokens": max_tokens, "ignore_eos": True}
    answer = await http.post(
        "/v1/completions", json=body, headers={"x-service-class": service_class, **headers}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == max_tokens
    return answer.status_code


def finished(url: str, service_class: str) -> float:
    series = f'tandem_requests_total{{class="{service_class}",kind="generate",outcome='
    return metric(url, f'{series}"met"') + metric(url, f'{series}"late"')


async def test_engine_preempts_for_urgent_requests_and_frees_every_block(url):
    """Background requests need all blocks; then requests of a higher class arrive."""
    preempted = metric(url, "tandem_engine_preemptions_total")
    before = finished(url, "interactive"), finished(url, "batch")
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        background = [asyncio.create_task(complete(http, "batch", 200)) for _ in range(40)]
        while metric(url, "tandem_engine_requests_waiting") == 0:
            assert not all(task.done() for task in background), "no background request was seen waiting"
            await asyncio.sleep(0.05)
        assert metric(url, "tandem_requests_waiting") == 0, "one queue, and it is the engine's"
        # An objective that the slowest machine meets; a request predicted to be late would be rejected.
        patient = {"x-slo-ttft-ms": "60000"}
        urgent = [asyncio.create_task(complete(http, "interactive", 20, **patient)) for _ in range(4)]
        assert set(await asyncio.gather(*urgent, *background)) == {200}
    assert metric(url, "tandem_engine_preemptions_total") > preempted
    assert metric(url, "tandem_engine_recompute_tokens_total") > 0
    for left in ("held_bytes", "engine_used_bytes", "requests_running", "engine_requests_waiting"):
        assert metric(url, f"tandem_{left}") == 0, left
    assert (finished(url, "interactive"), finished(url, "batch")) == (before[0] + 4, before[1] + 40)


async def test_ordering_of_the_running_engine_can_change(url):
    async with httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer root"}) as admin:
        for ordering in ("srmt", "edf"):
            change = {"scheduling": {"engine": {"ordering": ordering}}}
            answer = await admin.put("/admin/config", json=change)
            assert answer.status_code == 200, answer.text
            now = (await admin.get("/admin/config")).json()["config"]
            assert now["scheduling"]["engine"] == {"ordering": ordering, "look_ahead": "none"}
            assert await complete(admin, "standard", 5) == 200


async def test_three_times_the_sustainable_rate_leaves_no_memory_behind(url):
    report = await overload(url, 3.0, 5.0, 1)
    assert report["unanswered"] == {}
    assert report["rejections_without_retry_after"] == 0
    assert set(report["statuses"]) <= {"200", "429"}
    assert report["samples_over_quota"] == 0
    assert report["held_after"] == 0
    assert report["ready_after"] == 200


@pytest.mark.untimed
def test_check_prints_the_plan_and_refuses_invalid_arguments(tmp_path: Path):
    command = [sys.executable, "-m", "controlplane.cli", "check"]
    path = tmp_path / "wrong.yaml"
    misspelt = Path("configs/dev.yaml").read_text(encoding="utf-8").replace("max_num_seqs", "max_numseqs")
    path.write_text(misspelt, encoding="utf-8")
    checked = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 2 and checked.stdout == ""
    assert "vLLM has no engine argument 'max_numseqs'; did you mean max_num_seqs" in checked.stderr
    good = subprocess.run([*command, "configs/dev.yaml"], capture_output=True, text=True, check=True)
    assert "requests of 2,048 tokens (prompt + output) fit at once" in good.stdout
    path.write_text("models: {chat: {model: tandem/tiny-llama}}\npool: {memory: 1MiB}\n", encoding="utf-8")
    bad = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "pool.memory=1048576" in bad.stderr


def children_of(process_id: int) -> list[int]:
    threads = Path(f"/proc/{process_id}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def test_killed_server_leaves_no_process_behind(server):
    """Must run last: the other tests need the server."""
    left = [os.pidfd_open(child) for child in children_of(server.process_id)]
    # The engine, the embedding worker, and Python's resource tracker, which ends after them.
    assert len(left) >= 3
    os.kill(server.process_id, signal.SIGKILL)
    end = time.monotonic() + 30
    while left:
        ended = select.select(left, [], [], max(0.0, end - time.monotonic()))[0]
        assert ended, f"{len(left)} are still there"
        for process in ended:
            left.remove(process)
            os.close(process)
