"""Tests of the plain embedding endpoint and of its handling of disconnected clients."""

import asyncio

import orjson
import pytest

from backends.testing.scripted import ScriptedEmbedder
from benchmark_control_plane.judge.embedding_server import application, embedder_from
from benchmark_control_plane.judge.system_schema import Live, Split
from benchmark_control_plane.judge.systems import embedding_server
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.config import parse
from controlplane.config.models_section import ChatModel, EmbeddingModel
from controlplane.service.engine_builders import embedders_of

SCOPE = {
    "type": "http", "method": "POST", "path": "/v1/embeddings", "headers": [], "query_string": b"",
}  # fmt: skip


def asked(embedder, stays_seconds):
    """Response status and its send time; the client disconnects after `stays_seconds`."""
    body = orjson.dumps({"input": [[1, 2, 3]]})
    coming = [{"type": "http.request", "body": body, "more_body": False}]
    sent = []

    async def receive():
        if coming:
            return coming.pop()
        await asyncio.sleep(stays_seconds)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append((asyncio.get_running_loop().time(), message))

    async def go():
        await embedder.start()
        await application(embedder)(SCOPE, receive, send)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    run(go())
    return sent[0][1]["status"], sent[0][0]


def test_connected_client_gets_a_response():
    assert asked(ScriptedEmbedder(call_seconds=2), stays_seconds=60) == (200, pytest.approx(2))


def test_work_of_a_disconnected_client_is_dropped():
    assert asked(ScriptedEmbedder(call_seconds=60), stays_seconds=3) == (499, pytest.approx(3))


def test_worker_options_equal_those_of_tandem():
    """Both sides derive equal worker options from one section of an experiment."""
    stated = {
        "model": "tandem/minilm", "name": "minilm", "device": "cuda", "dtype": "float16",
        "max_input_tokens": 256, "normalize": False, "trust_remote_code": True, "batch_tokens": 65_536,
        "threads": 1, "idle_cpu_priority": False, "max_running": 64, "stall_ms": 120_000,
    }  # fmt: skip
    live = Live(ChatModel("tandem/tiny-llama"), EmbeddingModel(**stated))
    (ours,) = embedders_of(parse({"models": {"embeddings": [stated]}}))
    command = list(embedding_server(live, Split()).command)
    theirs, _ = embedder_from(command[command.index("--port") :])
    assert theirs._options == ours._options
    assert (theirs.model, theirs.max_running) == (ours.model, ours.max_running)
    command = list(embedding_server(live, Split(embed_batch_tokens=1_024)).command)
    smaller, _ = embedder_from(command[command.index("--port") :])
    assert smaller._options.batch_tokens == 1_024


def test_invalid_settings_are_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        embedder_from(["--port", "1", "--settings", '{"devise": "cuda"}'])
    assert "did you mean 'device'" in capsys.readouterr().err
