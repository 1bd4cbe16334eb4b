"""The real MiniLM behind the `Embedder` port: correct rows in order, through failures and cancellations."""

import asyncio
import os
import signal

import numpy as np
import pytest
import pytest_asyncio

from backends.bundled_models import MINILM, resolve
from backends.embedding.client import WorkerEmbedder
from backends.embedding.memory_model import prior
from controlplane.core.errors import BackendDown, Refused
from controlplane.core.ports import EmbeddingPass
from tests.backends.embedding.real_worker import (
    BOUND_SECONDS,
    BUDGET,
    CAN_MEASURE,
    embed,
    heavy_inputs,
    kill_worker,
    sentences,
    until_gone,
)

on_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder():
    found = WorkerEmbedder(MINILM, served_name="minilm", batch_tokens=BUDGET, threads=1, stall_seconds=3)
    await found.start()
    yield found
    await found.stop()


@pytest.fixture(scope="module")
def reference():
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(resolve(MINILM), device="cpu")


@pytest.mark.engine
@on_module_loop
async def test_rows_equal_encode_in_request_order(embedder, reference):
    texts = ["", " \n\t ", "  space before and after  ", *sentences(150)]
    found = await embed(embedder, await embedder.tokenize(texts))
    assert found.dtype == np.float32
    assert np.abs(found - reference.encode(texts)).max() < 1e-5


@pytest.mark.engine
@on_module_loop
@pytest.mark.parametrize("side", ["right", "left"])
async def test_truncated_inputs_equal_encode_at_that_length(embedder, reference, side, monkeypatch):
    texts, limit = sentences(60), 24
    whole = await embedder.tokenize(texts)
    found = await embed(embedder, [embedder.truncate(ids, limit, side) for ids in whole])
    monkeypatch.setattr(reference, "max_seq_length", limit)
    monkeypatch.setattr(reference.tokenizer, "truncation_side", side)
    assert sum(len(ids) > limit for ids in whole) > 30
    assert np.abs(found - reference.encode(texts)).max() < 1e-5


@pytest.mark.engine
@on_module_loop
async def test_concurrent_calls_get_their_own_rows(embedder):
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
async def test_the_longest_input_is_computed_and_a_longer_one_rejected(embedder):
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
    ("inputs", "message"),
    [
        ([], "input is empty"),
        ([[101], []], "input 1 has no tokens"),
        ([[-1]], "token id -1"),
        ([[5, 30_522]], "token id 30522"),
        ([[5, 10**30]], f"token id {10**30}"),
    ],
)
async def test_invalid_token_ids_are_rejected(embedder, inputs, message):
    with pytest.raises(Refused, match=message):
        await embed(embedder, inputs)


@pytest.mark.engine
@on_module_loop
async def test_facts_come_from_the_model(embedder):
    assert (embedder.model, embedder.dimension, embedder.max_input_tokens) == ("minilm", 384, 256)
    assert embedder.supported_dimensions == (384,)
    assert embedder.facts.weight_bytes == 4 * 22_713_216
    unmeasured = prior({"hidden_size": 384, "intermediate_size": 1_536}, bytes_per_element=4, dimension=384)
    assert (embedder.facts.memory == unmeasured) is not CAN_MEASURE
    assert embedder.prompts == {}
    assert embedder.batch_bytes([256] * 1_000) <= embedder.workspace_bytes


@pytest.mark.engine
@on_module_loop
async def test_an_embedding_model_joins_no_pairs(embedder):
    with pytest.raises(Refused, match=r"models\.rerankers"):
        embedder.pair([1], [2], 64)


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
async def test_inputs_of_a_cancelled_call_are_not_computed(embedder):
    passes: list[EmbeddingPass] = []
    started = asyncio.Event()

    def record(finished: EmbeddingPass) -> None:
        passes.append(finished)
        started.set()

    embedder.on_pass = record
    leaving = asyncio.create_task(embed(embedder, heavy_inputs(160)))
    await asyncio.wait_for(started.wait(), BOUND_SECONDS)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await embed(embedder, [[101, 102]])
    embedder.on_pass = None
    # One pass computed, two in flight at the cancellation, then the pass of the second call.
    assert len(passes) == 4
    assert passes[-1].inputs == 1
    assert sum(p.inputs for p in passes) < 161


@pytest.mark.engine
@on_module_loop
async def test_a_killed_worker_is_replaced_and_its_calls_complete(embedder, caplog):
    before = embedder.restarts, embedder.out_of_memory
    inputs = [[101, 2000 + i, 102] for i in range(200)] + heavy_inputs(24)
    expected = await embed(embedder, inputs)
    working = [asyncio.create_task(embed(embedder, inputs[i::3])) for i in range(3)]
    await embedder.check()
    pid = kill_worker(embedder)
    assert until_gone(pid)
    for i, found in enumerate(await asyncio.gather(*working)):
        assert np.abs(found - expected[i::3]).max() < 1e-5
    assert embedder.worker_pid not in (None, pid)
    # Counted as out of memory, because the OOM killer also sends SIGKILL.
    assert (embedder.restarts, embedder.out_of_memory) == (before[0] + 1, before[1] + 1)
    assert "exit status -9, killed by another process" in caplog.text
    await embedder.check()


@pytest.mark.engine
@on_module_loop
async def test_a_stalled_worker_is_killed_and_its_calls_complete(embedder, caplog):
    inputs = [[101, 2000 + i, 102] for i in range(100)]
    expected = await embed(embedder, inputs)
    killed, before = embedder.worker_pid, embedder.stall_count
    working = [asyncio.create_task(embed(embedder, inputs[i::2])) for i in range(2)]
    await embedder.check()
    os.kill(killed, signal.SIGSTOP)
    working.append(asyncio.create_task(embed(embedder, inputs)))
    with pytest.raises(BackendDown, match="stalled and was killed; another is starting"):
        await asyncio.wait_for(embedder.check(), BOUND_SECONDS)
    found = await asyncio.gather(*working)
    for rows, same in zip(found, [expected[0::2], expected[1::2], expected], strict=True):
        assert np.abs(rows - same).max() < 1e-5
    assert until_gone(killed)
    assert embedder.worker_pid not in (None, killed)
    assert embedder.stall_count == before + 1
    assert "killed by another process" not in caplog.text
    assert "no response within its deadline; exit status -9" in caplog.text


@pytest.mark.engine
@on_module_loop
async def test_calls_and_checks_fail_while_no_worker_is_ready(embedder):
    working = asyncio.create_task(embed(embedder, heavy_inputs()))
    await embedder.check()
    kill_worker(embedder)
    with pytest.raises(BackendDown, match="died; another is starting"):
        await embedder.check()
    with pytest.raises(BackendDown, match="another is starting") as refusal:
        await embed(embedder, [[101, 102]])
    # The duration of the first start.
    assert refusal.value.retry_after is not None and 1 < refusal.value.retry_after <= 30
    await asyncio.wait_for(embedder.ready.wait(), BOUND_SECONDS)
    kill_worker(embedder)
    with pytest.raises(BackendDown, match="died") as lost:
        await working
    assert lost.value.retry_after is not None
    await asyncio.wait_for(embedder.ready.wait(), BOUND_SECONDS)
    await embedder.check()


@pytest.mark.engine
@on_module_loop
async def test_the_worker_ignores_signals_to_the_process_group(embedder):
    pid = embedder.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert (await embed(embedder, heavy_inputs(4))).shape == (4, 384)
    assert embedder.worker_pid == pid


@pytest.mark.engine
@on_module_loop
async def test_a_smaller_budget_shrinks_batches_and_changes_no_vector(embedder):
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
async def test_batches_follow_their_cost_and_have_a_predicted_time(embedder):
    passes: list[EmbeddingPass] = []
    embedder.on_pass = passes.append
    # A pass just before, so that no floor has accumulated.
    await embed(embedder, heavy_inputs(1))
    passes.clear()
    longest = embedder.batch_time([256])
    embedder.pause_cost = lambda: lambda pauses: [1.0 * (pause > 1.5 * longest / 1e9) for pause in pauses]
    assert (await embed(embedder, heavy_inputs(5))).shape == (5, 384)
    embedder.pause_cost = embedder.on_pass = None
    assert max(p.inputs for p in passes) < 5
    assert sum(p.inputs for p in passes) == 5
    assert embedder.batch_time([256]) < embedder.batch_time([256] * 8) < embedder.batch_time([256] * 64)
