"""Life cycle of the worker: start, options, restart, out of memory and shutdown."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import pytest_asyncio

from backends.bundled_models import MINILM, resolve
from backends.embedding.client import WorkerEmbedder
from backends.embedding.handshake import EncoderOptions
from backends.embedding.worker_link import WorkerLink
from controlplane.core.clock import Instant
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from tests.backends.embedding.real_worker import (
    BOUND_SECONDS,
    BUDGET,
    CAN_MEASURE,
    address_space_limited,
    embed,
    heavy_inputs,
    resident_bytes,
    scheduling_of,
    sentences,
    until_gone,
)

FRAGILE_TOKEN = 7777


@pytest.mark.engine
@pytest.mark.untimed
async def test_out_of_memory_halves_batches_and_fails_only_inputs_that_never_fit(caplog, monkeypatch):
    # Freed memory returns to the system, so that the limit below applies to every large allocation.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    embedder = WorkerEmbedder(MINILM, batch_tokens=BUDGET, threads=1)
    await embedder.start()
    # On a slow machine passes would have one or two inputs, which fit.
    budget = embedder._dispatcher.budget
    assert budget is not None
    budget.full_tokens = BUDGET
    expected = await embed(embedder, heavy_inputs(16))
    before = embedder.batch_bytes([256] * 16)
    with address_space_limited(embedder, spare_bytes=12 * 2**20):
        found = await embed(embedder, heavy_inputs(16))
    assert np.abs(found - expected).max() < 1e-5
    assert "retrying it in halves" in caplog.text
    assert embedder.batch_bytes([256] * 16) < before
    # A worker that the failure broke exits and is replaced.
    await asyncio.wait_for(embedder.ready.wait(), BOUND_SECONDS)
    await embed(embedder, heavy_inputs(1))
    with address_space_limited(embedder, spare_bytes=0), pytest.raises(BackendFailed, match="input 0"):
        await embed(embedder, heavy_inputs(1))
    await asyncio.wait_for(embedder.ready.wait(), BOUND_SECONDS)
    assert (await embed(embedder, heavy_inputs(1))).shape == (1, 384)
    await embedder.stop()


@pytest.fixture(scope="module")
def fragile_model(tmp_path_factory):
    """MiniLM that a pass of several inputs with FRAGILE_TOKEN breaks permanently."""
    folder = tmp_path_factory.mktemp("models") / "fragile"
    shutil.copytree(resolve(MINILM), folder)
    (folder / "fragile.py").write_text(f"""
import torch

class Fragile(torch.nn.Module):
    def forward(self, features):
        ids = features["input_ids"]
        if len(ids) > 1 and (ids == {FRAGILE_TOKEN}).any():
            raise RuntimeError("could not create a primitive")
        return features

    def save(self, *_, **__):
        pass

    @classmethod
    def load(cls, *_, **__):
        return cls()
""")
    path = folder / "modules.json"
    modules = json.loads(path.read_text())
    fragile = {"idx": len(modules), "name": "fragile", "path": "", "type": "fragile.Fragile"}
    path.write_text(json.dumps([*modules, fragile]))
    return str(folder)


@pytest.mark.engine
@pytest.mark.untimed
@pytest.mark.slow
async def test_calls_at_a_worker_that_a_batch_broke_keep_their_retry(fragile_model):
    embedder = WorkerEmbedder(fragile_model, threads=1, trust_remote_code=True)
    await embedder.start()
    inputs = [[101, 2000, 102], [101, FRAGILE_TOKEN, 102], [101, FRAGILE_TOKEN, 2000, 102]]
    alone = [await embed(embedder, [one]) for one in inputs]
    found = await embed(embedder, inputs)
    restarts, out_of_memory = embedder.restarts, embedder.out_of_memory
    await embedder.stop()
    assert np.abs(found - np.concatenate(alone)).max() < 1e-5
    # The batch of three fails, then the half with two inputs.
    assert (restarts, out_of_memory) == (2, 2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def returning():
    """A worker that returns memory, for two tests of which the second one stops it."""
    embedder = WorkerEmbedder(MINILM, batch_tokens=BUDGET, threads=1, returns_memory=True)
    await embedder.start()
    yield embedder
    await embedder.stop()


@pytest.mark.engine
@pytest.mark.untimed
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.skipif(not CAN_MEASURE, reason="resident memory is read from /proc")
async def test_a_lower_budget_releases_memory_with_returns_memory(returning):
    budget, released = returning.budget_bytes, []
    # After two seconds of work the worker releases memory by itself, and none is left for the budget.
    for _ in range(3):
        returning.set_budget_bytes(budget)
        await embed(returning, heavy_inputs(8))
        before = resident_bytes(returning)
        returning.set_budget_bytes(budget // 2)
        await returning.check()
        released.append(before - resident_bytes(returning))
    assert max(released) > 2**20


@pytest.mark.engine
@pytest.mark.untimed
@pytest.mark.asyncio(loop_scope="module")
async def test_stop_ends_the_worker_and_fails_pending_calls(returning):
    pid = returning.worker_pid
    assert pid is not None
    working = asyncio.create_task(embed(returning, heavy_inputs()))
    await returning.check()
    await returning.stop()
    assert until_gone(pid)
    with pytest.raises(BackendDown, match="is stopped"):
        await working
    with pytest.raises(BackendDown, match="is stopped"):
        await returning.check()


@pytest.mark.engine
async def test_a_worker_that_does_not_load_within_its_deadline_is_killed():
    link = await WorkerLink.open(
        EncoderOptions(resolve(MINILM), batch_tokens=BUDGET, threads=1), stall_seconds=0.1, load_seconds=0.1
    )
    async with asyncio.timeout(BOUND_SECONDS):
        assert await link.receive() is None
    assert link.is_stalled
    assert await link.close() == "no response within its deadline; exit status -9"


@pytest.mark.engine
@pytest.mark.untimed
async def test_stop_right_after_start_ends_the_worker():
    embedder = WorkerEmbedder(MINILM, threads=1)
    await embedder.start()
    pid = embedder.worker_pid
    assert pid is not None
    await embedder.stop()
    assert until_gone(pid)


@pytest.mark.engine
@pytest.mark.untimed
async def test_a_load_failure_names_the_model(tmp_path):
    embedder = WorkerEmbedder(str(tmp_path))
    with pytest.raises(BackendDown, match=f"{tmp_path.name}' does not load: "):
        await embedder.start()


@pytest.fixture(scope="module")
def prompted_model(tmp_path_factory):
    """MiniLM with prompts, as retrieval models have them."""
    folder = tmp_path_factory.mktemp("models") / "prompted"
    shutil.copytree(resolve(MINILM), folder)
    path = folder / "config_sentence_transformers.json"
    stated = json.loads(path.read_text()) if path.exists() else {}
    stated |= {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "passage"}
    path.write_text(json.dumps(stated))
    return str(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def idle(prompted_model):
    embedder = WorkerEmbedder(prompted_model, threads=2, idle_cpu_priority=True)
    await embedder.start()
    yield embedder
    await embedder.stop()


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="module")
async def test_prompts_lanes_and_idle_priority_change_no_vector(prompted_model, idle):
    from sentence_transformers import SentenceTransformer

    texts = sentences(40)
    reference = SentenceTransformer(prompted_model, device="cpu")
    assert idle.facts.lanes == 2
    queries = await embed(idle, await idle.tokenize(texts, prompt="query"))
    passages = await embed(idle, await idle.tokenize(texts))
    with pytest.raises(Refused, match=r"'poem': .* has passage, query"):
        await idle.tokenize(texts, prompt="poem")
    policies, session = scheduling_of(idle), os.getsid(idle.worker_pid)
    assert np.abs(queries - reference.encode(texts, prompt_name="query")).max() < 1e-5
    assert np.abs(passages - reference.encode(texts)).max() < 1e-5
    assert np.abs(queries - passages).max() > 1e-3
    assert policies == {os.SCHED_IDLE}
    # A session of its own keeps its idle priority from lowering the server's share of a core.
    assert session != os.getsid(0)


def no_cost(pauses):
    return [0.0] * len(pauses)


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="module")
async def test_worker_leaves_the_idle_class_without_generations_and_for_a_deadline(idle, monkeypatch):
    # On a busy machine the pass in the idle class starves, which is a reason to leave, too.
    monkeypatch.setattr("backends.embedding.batch_dispatcher._STARVED_SECONDS", BOUND_SECONDS)
    policies, costs = [], [None, no_cost, no_cost]
    idle.pause_cost = lambda: costs[len(policies) % 3]
    idle.on_pass = lambda done: policies.append(scheduling_of(idle))
    texts = await idle.tokenize(["a query of some words"])
    await embed(idle, texts)
    await embed(idle, texts)
    work = idle.batch_time([len(texts[0])])
    await embed(idle, texts, deadline=Instant(time.monotonic_ns() + work + work // 2))
    idle.pause_cost = idle.on_pass = None
    assert policies == [{os.SCHED_OTHER}, {os.SCHED_IDLE}, {os.SCHED_OTHER}]


@pytest.mark.engine
@pytest.mark.untimed
async def test_options_reach_the_model():
    embedder = WorkerEmbedder(
        MINILM, dtype="bfloat16", normalize=False, max_input_tokens=300, dimensions=(64, 384), threads=1
    )
    await embedder.start()
    [row] = await embed(embedder, [[101, *[2000] * 298, 102]])
    await embedder.stop()
    assert not np.isclose(np.linalg.norm(row), 1, atol=0.1)
    assert embedder.facts.weight_bytes == 2 * 22_713_216
    assert embedder.supported_dimensions == (64, 384)


@pytest.mark.engine
@pytest.mark.untimed
async def test_an_unsupported_dimension_fails_the_start():
    embedder = WorkerEmbedder(MINILM, dimensions=(64, 512), threads=1)
    with pytest.raises(BackendDown, match="dimensions=512 exceeds the 384 dimensions of the model"):
        await embedder.start()


@pytest.mark.engine
@pytest.mark.untimed
def test_the_worker_exits_when_its_server_is_killed():
    server = """
import asyncio
from backends.embedding.client import WorkerEmbedder
from backends.embedding.handshake import EncoderOptions
from backends.embedding.worker_link import WorkerLink

async def main():
    embedder = WorkerEmbedder("tandem/minilm", threads=1)
    await embedder.start()
    print(embedder.worker_pid, flush=True)
    await embedder.embed(None, [[101] * 256] * 2000, deadline=None)

asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, env=environment) as running:
        assert running.stdout is not None
        pid = int(running.stdout.readline())
        running.kill()
    assert until_gone(pid)


async def test_calls_before_start_raise_backend_down():
    embedder = WorkerEmbedder(MINILM)
    with pytest.raises(BackendDown, match="not started"):
        await embedder.check()
    with pytest.raises(BackendDown, match="not started"):
        await embedder.tokenize(["a"])
    with pytest.raises(BackendDown, match="not started"):
        await embed(embedder, [[1]])


def test_the_client_imports_neither_torch_nor_transformers():
    script = (
        "import sys, backends.embedding.client; "
        "print(sorted({'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert found.stdout.strip() == "[]"


async def test_a_crash_of_the_supervisor_task_fails_pending_tokenizations(caplog):
    """Calls and tokenizations fail instead of waiting without end."""
    embedder, sent = WorkerEmbedder(MINILM), asyncio.Event()
    text = asyncio.create_task(embedder._tokenizations.tokenize(["a text"], lambda frame: sent.set()))

    async def fail():
        await sent.wait()
        raise ValueError("a defect")

    supervisor = asyncio.create_task(fail())
    supervisor.add_done_callback(embedder._supervisor_ended)
    with pytest.raises(BackendDown, match="is not supervised any more"):
        async with asyncio.timeout(5):
            await text
    assert "a defect" in caplog.text


async def test_a_start_that_fails_for_an_unknown_reason_is_repeated(monkeypatch):
    embedder, results = WorkerEmbedder(MINILM), iter([RuntimeError("can't start new thread"), "a link"])

    async def launch():
        if isinstance(result := next(results), Exception):
            raise result
        return result

    monkeypatch.setattr("backends.embedding.client._FIRST_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(embedder, "_launch", launch)
    assert await embedder._restart() == "a link"
    assert embedder.restarts == 2
    assert "can't start new thread" in embedder.down
