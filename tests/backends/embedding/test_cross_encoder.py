"""The real worker scores as `CrossEncoder.predict`, with and without token types, and out of memory."""

import asyncio
import shutil

import numpy as np
import pytest
import pytest_asyncio

from backends.bundled_models import BOS, EOS, TOKEN_IDS, build_cross_encoder, ensure_tiny_model
from backends.embedding.client import WorkerEmbedder
from backends.embedding.handshake import EncoderOptions
from controlplane.config import parse
from controlplane.core.errors import BackendFailed
from controlplane.service.bootstrap import assemble
from controlplane.service.request_jobs import MODEL_LIMIT, Caller, RequestOrigin, TextPairs
from tests.backends.embedding.real_worker import (
    BOUND_SECONDS,
    BUDGET,
    address_space_limited,
    embed,
    sentences,
)

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

QUERY = "How do two kinds of work share a device?"


XLM_ROBERTA = {
    "model_type": "xlm-roberta", "vocab_size": 2048, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 512 + TOKEN_IDS["pad_token_id"] + 1, "type_vocab_size": 1, "num_labels": 1,
    **TOKEN_IDS,
}  # fmt: skip


@pytest.fixture(scope="module")
def xlm_roberta(tmp_path_factory):
    folder = tmp_path_factory.mktemp("xlm-roberta")
    inputs = ["input_ids", "attention_mask"]
    single, pair = f"{BOS} $A {EOS}", f"{BOS} $A {EOS} {EOS} $B {EOS}"
    build_cross_encoder(folder, XLM_ROBERTA, single, pair, inputs)
    return folder


@pytest.fixture(scope="module", params=["bert", "xlm-roberta"])
def folder(request):
    return (
        ensure_tiny_model("tiny-cross-encoder")
        if request.param == "bert"
        else request.getfixturevalue("xlm_roberta")
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer(folder):
    # Freed memory returns to the system, so that a limit applies to every large allocation.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    embedder = WorkerEmbedder(
        str(folder), batch_tokens=BUDGET, threads=1, scores_pairs=True, environment=environment
    )
    await embedder.start()
    yield embedder
    await embedder.stop()


async def scores(embedder: WorkerEmbedder, query: str, documents: list[str], limit: int, side=None):
    first, *others = await embedder.tokenize([query, *documents])
    return await embed(embedder, [embedder.pair(first, ids, limit, side) for ids in others])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("limit", [512, 24])
async def test_scores_equal_predict(folder, scorer, limit):
    from sentence_transformers import CrossEncoder

    documents = ["", "Two kinds", f"a literal {EOS} token", *sentences(30), "long " * 900]
    reference = CrossEncoder(str(folder), device="cpu")
    reference.max_seq_length = limit
    expected = reference.predict([(QUERY, text) for text in documents], show_progress_bar=False)
    found = await scores(scorer, QUERY, documents, limit)
    assert expected.std() > 1e-3
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-5)
    np.testing.assert_allclose(1 / (1 + np.exp(-found[:, 1])), expected, atol=1e-5)


@pytest.mark.asyncio(loop_scope="module")
async def test_passes_are_timed_by_a_model_of_its_own(scorer):
    budget = scorer._dispatcher.budget
    before = budget.time._observations
    documents = sentences(60)
    await scores(scorer, QUERY, documents, 512)
    assert budget.time.model == scorer.facts.time
    assert budget.time._observations > before
    assert 0 < scorer.batch_time([64]) < scorer.batch_time([64] * 64) < scorer.batch_time([512] * 64)


@pytest.mark.asyncio(loop_scope="module")
async def test_out_of_memory_halves_batches_and_fails_only_pairs_that_never_fit(scorer, caplog):
    # On a slow machine passes would have one or two pairs, which fit.
    scorer._dispatcher.budget.full_tokens = BUDGET
    document, before = "memory " * 900, scorer.batch_bytes([512] * 16)
    expected = await scores(scorer, QUERY, [document] * 16, 512)
    with address_space_limited(scorer, spare_bytes=2 * 2**20):
        found = await scores(scorer, QUERY, [document] * 16, 512)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert "retrying it in halves" in caplog.text
    assert scorer.batch_bytes([512] * 16) < before
    # A worker that the failure broke exits and is replaced.
    await asyncio.wait_for(scorer.ready.wait(), BOUND_SECONDS)
    await scores(scorer, QUERY, [document], 512)
    with address_space_limited(scorer, spare_bytes=0), pytest.raises(BackendFailed, match="input 0"):
        await scores(scorer, QUERY, [document], 512)
    await asyncio.wait_for(scorer.ready.wait(), BOUND_SECONDS)
    np.testing.assert_allclose(await scores(scorer, QUERY, [document], 512), expected[:1], atol=1e-5)


async def test_a_service_with_rerankers_only_scores_as_predict_does():
    from sentence_transformers import CrossEncoder

    documents = sentences(100)
    model = {"model": "tandem/tiny-cross-encoder", "name": "tiny", "threads": 1}
    service = assemble(parse({"models": {"rerankers": [model]}, "pool": {"memory": "2GiB"}}))
    await service.start()
    try:
        pairs = TextPairs([QUERY], documents)
        job = await service.intake.pairs.job(RequestOrigin("r", Caller("t")), None, pairs, MODEL_LIMIT)
        found = (await service.gate.embed(job)).vectors[:, 0]
    finally:
        await service.stop()
    reference = CrossEncoder(str(ensure_tiny_model("tiny-cross-encoder")), device="cpu")
    expected = reference.predict([(QUERY, text) for text in documents], show_progress_bar=False)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def load(folder):
    """Loads a model as a worker does, in this process."""
    from backends.embedding.cross_encoder import PairEncoder

    return PairEncoder(EncoderOptions(str(folder), batch_tokens=BUDGET, threads=1, scores_pairs=True))


def test_a_model_with_several_labels_is_refused(tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from backends.embedding.encoder import Unsupported

    folder = ensure_tiny_model("tiny-cross-encoder")
    AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, ignore_mismatched_sizes=True
    ).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="3 labels, and a reranker needs one"):
        load(tmp_path)


def test_a_default_prompt_is_refused(tmp_path):
    """`predict` would put it before both texts."""
    from sentence_transformers import CrossEncoder

    from backends.embedding.encoder import Unsupported

    shutil.copytree(ensure_tiny_model("tiny-cross-encoder"), tmp_path / "model")
    model = CrossEncoder(str(tmp_path / "model"), prompts={"ask": "query: "}, default_prompt_name="ask")
    model.save_pretrained(str(tmp_path / "prompted"))
    with pytest.raises(Unsupported, match=r"differ from predict\(\)"):
        load(tmp_path / "prompted")
