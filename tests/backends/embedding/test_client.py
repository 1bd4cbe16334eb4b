"""The real MiniLM behind the port: right rows, in order, whatever dies or leaves."""

import asyncio
import contextlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
import pytest_asyncio

from backends.embedding.bundled import MINILM, resolve
from backends.embedding.client import WorkerEmbedder
from controlplane.core.clock import Duration, Instant
from controlplane.core.ports import BackendDown, BackendFailed, EmbeddingPass, Refused
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo

REQUEST = Request(
    id="r1",
    kind=Kind.EMBED,
    model="minilm",
    tenant="t",
    service_class=ServiceClass("standard", Slo(), priority=0, sheddable=False),
    slo=Slo(),
    arrival=Instant(0),
    prompt_tokens=1,
    max_output_tokens=0,
)
BOUND_SECONDS = 120
BUDGET = 4_096
CAN_MEASURE = Path("/proc/self/clear_refs").exists()

on_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder():
    found = WorkerEmbedder(MINILM, served_name="minilm", batch_tokens=BUDGET, threads=1)
    await found.start()
    yield found
    await found.stop()


async def embed(embedder: WorkerEmbedder, inputs):
    return await asyncio.wait_for(embedder.embed(REQUEST, inputs, deadline=None), BOUND_SECONDS)


def until_gone(pid: int) -> bool:
    """Whether the process ended within the bound; it need not be a child."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watch], [], [], BOUND_SECONDS)[0])
    finally:
        os.close(watch)


def kill_worker(embedder: WorkerEmbedder) -> int:
    pid = embedder.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def scheduling_of(embedder: WorkerEmbedder) -> set[int]:
    """How the system schedules the worker's threads."""
    threads = Path(f"/proc/{embedder.worker_pid}/task").iterdir()
    return {os.sched_getscheduler(int(thread.name)) for thread in threads}


@contextlib.contextmanager
def address_space_limited(embedder: WorkerEmbedder, *, spare_bytes: int):
    """Lets the worker of now have `spare_bytes` more than it has."""
    pid = embedder.worker_pid
    assert pid is not None
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    in_use = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (in_use + spare_bytes, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, before)


def heavy_inputs(count: int = 64) -> list[list[int]]:
    """Seconds of work on one core, in several batches."""
    return [[101, *[2000 + i] * 254, 102] for i in range(count)]


def sentences(count: int) -> list[str]:
    random = Random(7)
    words = ["memory", "token", "deadline", "queue", "Überlast", "two", "kinds", "of", "work", "✓"]
    return [" ".join(random.choices(words, k=random.randint(0, 90))) for _ in range(count)]


@pytest.mark.engine
@on_module_loop
async def test_rows_equal_encode_in_the_order_given(embedder):
    from sentence_transformers import SentenceTransformer

    texts = ["", "  space before and after  ", *sentences(150)]
    reference = SentenceTransformer(resolve(MINILM), device="cpu").encode(texts)
    found = await embed(embedder, await embedder.tokenize(texts))
    assert found.dtype == np.float32
    assert np.abs(found - reference).max() < 1e-5


@pytest.mark.engine
@on_module_loop
async def test_calls_side_by_side_get_their_own_rows(embedder):
    inputs = await embedder.tokenize(sentences(40))
    alone = await embed(embedder, inputs)
    together = await asyncio.gather(*(embed(embedder, inputs[i : i + 4]) for i in range(0, 40, 4)))
    assert np.abs(np.concatenate(together) - alone).max() < 1e-5


@pytest.mark.engine
@on_module_loop
async def test_2048_inputs_in_one_call(embedder):
    words = [f"word {i % 97} {i}" for i in range(2_048)]
    inputs = await embedder.tokenize(words)
    found = await embed(embedder, inputs)
    assert found.shape == (2_048, embedder.dimension)
    for row in (0, 1_000, 2_047):
        assert np.abs((await embed(embedder, [inputs[row]]))[0] - found[row]).max() < 1e-5


@pytest.mark.engine
@on_module_loop
async def test_the_longest_input_is_computed_and_a_longer_one_refused(embedder):
    [ids] = await embedder.tokenize(["memory " * 100_000])
    assert len(ids) == 100_002
    with pytest.raises(Refused, match="100002 tokens: the model takes 1 to 256") as refusal:
        await embed(embedder, [ids])
    assert refusal.value.code == "context_length_exceeded"
    found = await embed(embedder, [ids[: embedder.max_input_tokens]] * 40)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


@pytest.mark.engine
@on_module_loop
@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ([], "input is empty"),
        ([[101], []], "input 1 has 0 tokens"),
        ([[-1]], "token id -1"),
        ([[5, 30_522]], "token id 30522"),
    ],
)
async def test_ids_that_the_model_lacks_are_refused(embedder, inputs, told):
    with pytest.raises(Refused, match=told):
        await embed(embedder, inputs)


@pytest.mark.engine
@on_module_loop
async def test_facts_come_from_the_model(embedder):
    assert (embedder.model, embedder.dimension, embedder.max_input_tokens) == ("minilm", 384, 256)
    assert embedder.supported_dimensions == (384,)
    assert embedder.facts.weight_bytes == 4 * 22_713_216
    assert embedder.facts.memory.is_measured == CAN_MEASURE
    assert embedder.prompts == {}
    assert embedder.batch_bytes([256] * 1_000) <= embedder.workspace_bytes


@pytest.mark.engine
@on_module_loop
async def test_every_pass_is_reported_within_the_budget(embedder):
    passes: list[EmbeddingPass] = []
    embedder.on_pass = passes.append
    inputs = heavy_inputs(40)
    await embed(embedder, inputs)
    embedder.on_pass = None
    assert sum(p.inputs for p in passes) == 40
    assert sum(p.tokens for p in passes) == 40 * 256
    assert all(p.padded_tokens <= BUDGET and p.elapsed > 0 for p in passes)


@pytest.mark.engine
@on_module_loop
async def test_what_a_client_left_is_not_computed(embedder):
    passes: list[EmbeddingPass] = []
    started = asyncio.Event()

    def saw(one: EmbeddingPass) -> None:
        passes.append(one)
        started.set()

    embedder.on_pass = saw
    leaving = asyncio.create_task(embed(embedder, heavy_inputs(160)))
    await asyncio.wait_for(started.wait(), BOUND_SECONDS)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await embed(embedder, [[101, 102]])
    embedder.on_pass = None
    # One computed, two were already under way, then the one that came after.
    assert len(passes) == 4
    assert passes[-1].inputs == 1
    assert sum(p.inputs for p in passes) < 161


@pytest.mark.engine
@on_module_loop
async def test_a_killed_worker_is_replaced_and_its_work_done(embedder):
    inputs = [[101, 2000 + i, 102] for i in range(200)] + heavy_inputs(24)
    expected = await embed(embedder, inputs)
    working = [asyncio.create_task(embed(embedder, inputs[i::3])) for i in range(3)]
    await embedder.check()
    pid = kill_worker(embedder)
    assert until_gone(pid)
    for i, found in enumerate(await asyncio.gather(*working)):
        assert np.abs(found - expected[i::3]).max() < 1e-5
    assert embedder.worker_pid not in (None, pid)
    await embedder.check()


@pytest.mark.engine
@on_module_loop
async def test_while_the_worker_is_gone_calls_and_checks_say_so(embedder):
    working = asyncio.create_task(embed(embedder, heavy_inputs()))
    await embedder.check()
    kill_worker(embedder)
    with pytest.raises(BackendDown, match="died; another is starting"):
        await embedder.check()
    with pytest.raises(BackendDown, match="another is starting"):
        await embed(embedder, [[101, 102]])
    await asyncio.wait_for(embedder.ready.wait(), BOUND_SECONDS)
    kill_worker(embedder)
    with pytest.raises(BackendDown, match="died"):
        await working
    await asyncio.wait_for(embedder.ready.wait(), BOUND_SECONDS)
    await embedder.check()


@pytest.mark.engine
@on_module_loop
async def test_a_signal_to_the_whole_group_leaves_the_end_to_the_server(embedder):
    pid = embedder.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert (await embed(embedder, heavy_inputs(4))).shape == (4, 384)
    assert embedder.worker_pid == pid


@pytest.mark.engine
async def test_out_of_memory_halves_the_batch_and_fails_only_what_never_fits(caplog, monkeypatch):
    # Freed memory goes back to the system, so that the limit below meets every large allocation.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    embedder = WorkerEmbedder(MINILM, batch_tokens=BUDGET, threads=1)
    await embedder.start()
    expected = await embed(embedder, heavy_inputs(16))
    before = embedder.batch_bytes([256] * 16)
    with address_space_limited(embedder, spare_bytes=12 * 2**20):
        found = await embed(embedder, heavy_inputs(16))
    assert np.abs(found - expected).max() < 1e-5
    assert "halving it" in caplog.text
    assert embedder.batch_bytes([256] * 16) < before
    # A worker that the failure broke for good ends itself and is replaced.
    await asyncio.wait_for(embedder.ready.wait(), BOUND_SECONDS)
    await embed(embedder, heavy_inputs(1))
    with address_space_limited(embedder, spare_bytes=0), pytest.raises(BackendFailed, match="input 0"):
        await embed(embedder, heavy_inputs(1))
    await asyncio.wait_for(embedder.ready.wait(), BOUND_SECONDS)
    assert (await embed(embedder, heavy_inputs(1))).shape == (1, 384)
    await embedder.stop()


@pytest.mark.engine
async def test_stop_ends_the_worker_and_fails_what_waits():
    embedder = WorkerEmbedder(MINILM, threads=1)
    await embedder.start()
    pid = embedder.worker_pid
    assert pid is not None
    working = asyncio.create_task(embed(embedder, heavy_inputs()))
    await embedder.check()
    await embedder.stop()
    assert until_gone(pid)
    with pytest.raises(BackendDown, match="is stopped"):
        await working
    with pytest.raises(BackendDown, match="is stopped"):
        await embedder.check()


@pytest.mark.engine
async def test_stop_right_after_the_start_ends_the_worker_too():
    embedder = WorkerEmbedder(MINILM, threads=1)
    await embedder.start()
    pid = embedder.worker_pid
    assert pid is not None
    await embedder.stop()
    assert until_gone(pid)


@pytest.mark.engine
async def test_a_model_that_does_not_load_is_named(tmp_path):
    embedder = WorkerEmbedder(str(tmp_path))
    with pytest.raises(BackendDown, match=f"{tmp_path.name}' does not load: "):
        await embedder.start()


@pytest.mark.engine
async def test_an_input_limit_beyond_the_models_positions_stops_the_start():
    embedder = WorkerEmbedder(MINILM, max_input_tokens=1_000)
    with pytest.raises(BackendDown, match="max_input_tokens=1000: the model has 512 positions; lower it"):
        await embedder.start()


@pytest.fixture(scope="module")
def prompted_model(tmp_path_factory):
    """MiniLM with instructions, as retrieval models have them."""
    folder = tmp_path_factory.mktemp("models") / "prompted"
    shutil.copytree(resolve(MINILM), folder)
    path = folder / "config_sentence_transformers.json"
    stated = json.loads(path.read_text()) if path.exists() else {}
    stated |= {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "passage"}
    path.write_text(json.dumps(stated))
    return str(folder)


@pytest.mark.engine
async def test_prompts_two_lanes_and_yielding_change_no_vector(prompted_model):
    from sentence_transformers import SentenceTransformer

    texts = sentences(40)
    reference = SentenceTransformer(prompted_model, device="cpu")
    embedder = WorkerEmbedder(prompted_model, threads=2, yields_cpu=True)
    await embedder.start()
    assert embedder.facts.lanes == 2
    queries = await embed(embedder, await embedder.tokenize(texts, prompt="query"))
    passages = await embed(embedder, await embedder.tokenize(texts))
    with pytest.raises(Refused, match=r"'poem': .* has passage, query"):
        await embedder.tokenize(texts, prompt="poem")
    policies = scheduling_of(embedder)
    await embedder.stop()
    assert np.abs(queries - reference.encode(texts, prompt_name="query")).max() < 1e-5
    assert np.abs(passages - reference.encode(texts)).max() < 1e-5
    assert np.abs(queries - passages).max() > 1e-3
    assert policies == {os.SCHED_IDLE}


@pytest.mark.engine
@on_module_loop
async def test_a_smaller_budget_cuts_batches_and_changes_no_vector(embedder):
    passes: list[EmbeddingPass] = []
    expected = await embed(embedder, heavy_inputs(12))
    whole = embedder.budget_bytes
    embedder.on_pass = passes.append
    embedder.set_budget_bytes(embedder.batch_bytes([256]) * 2)
    found = await embed(embedder, heavy_inputs(12))
    embedder.set_budget_bytes(0)
    alone = await embed(embedder, heavy_inputs(2))
    embedder.set_budget_bytes(whole)
    embedder.on_pass = None
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(alone - expected[:2]).max() < 1e-5
    assert max(p.inputs for p in passes[:-2]) <= 2
    assert [p.inputs for p in passes[-2:]] == [1, 1]


@pytest.mark.engine
@on_module_loop
async def test_batches_keep_to_the_slack_and_their_time_is_known_before(embedder):
    passes: list[EmbeddingPass] = []
    embedder.on_pass = passes.append
    embedder.batch_limit = lambda: Duration(0)
    assert (await embed(embedder, heavy_inputs(5))).shape == (5, 384)
    embedder.batch_limit = embedder.on_pass = None
    assert [p.inputs for p in passes] == [1] * 5
    assert embedder.batch_time([256]) < embedder.batch_time([256] * 8) < embedder.batch_time([256] * 64)


@pytest.mark.engine
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
def test_the_worker_ends_when_its_server_is_killed():
    server = """
import asyncio
from backends.embedding.client import WorkerEmbedder

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


async def test_nothing_answers_before_the_start():
    embedder = WorkerEmbedder(MINILM)
    with pytest.raises(BackendDown, match="not started"):
        await embedder.check()
    with pytest.raises(BackendDown, match="not started"):
        await embedder.tokenize(["a"])
    with pytest.raises(BackendDown, match="not started"):
        await embed(embedder, [[1]])


def test_the_server_side_imports_neither_torch_nor_transformers():
    script = (
        "import sys, backends.embedding.client; "
        "print(sorted({'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert found.stdout.strip() == "[]"
