"""Clients of text-embeddings-inference, unmodified, over a real socket; one that is not installed is skipped.

LiteLLM's reranking through this protocol is in test_rerank_clients.
"""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from tests.controlplane.api.example_bodies import EMBED, SECRET
from tests.controlplane.api.scripted_server import EMBED_MODEL, Stage, listening

pytestmark = pytest.mark.long

# The last one has more tokens than the model takes.
TEXTS = ["first", "second", "third" * 20]


@pytest.fixture
async def url(locked: Stage, monkeypatch) -> AsyncIterator[str]:
    constants = pytest.importorskip("huggingface_hub.constants")
    # The tests' environment forbids requests to Hugging Face; this server is here.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    async with listening(locked.app) as url:
        yield url


async def vectors(stage: Stage) -> np.ndarray:
    """The vectors that OpenAI's protocol returns for TEXTS."""
    body = {"model": EMBED_MODEL, "input": TEXTS, "truncate_prompt_tokens": -1}
    answer = await stage.http.post(EMBED, json=body, headers={"authorization": f"Bearer {SECRET}"})
    return np.array([row["embedding"] for row in answer.json()["data"]])


async def test_hugging_face(locked: Stage, url: str):
    client = pytest.importorskip("huggingface_hub").InferenceClient(url, token=SECRET)
    found = await asyncio.to_thread(client.feature_extraction, TEXTS, truncate=True)
    np.testing.assert_allclose(found, await vectors(locked), rtol=1e-5)


async def test_haystack(locked: Stage, url: str):
    embedders = pytest.importorskip("haystack_integrations.components.embedders.huggingface_api")
    rankers = pytest.importorskip("haystack_integrations.components.rankers.huggingface_api")
    from haystack import Document
    from haystack.utils import Secret

    token = Secret.from_token(SECRET)
    embedder = embedders.HuggingFaceAPIDocumentEmbedder(
        "text_embeddings_inference", {"url": url}, token=token, progress_bar=False
    )
    documents = [Document(content=text) for text in TEXTS]
    embedded = (await asyncio.to_thread(embedder.run, documents))["documents"]
    found = np.array([document.embedding for document in embedded])
    np.testing.assert_allclose(found, await vectors(locked), rtol=1e-5)
    ranker = rankers.HuggingFaceTEIRanker(url=url, token=token, top_k=2)
    ranked = (await asyncio.to_thread(ranker.run, "what", documents))["documents"]
    assert len(ranked) == 2 and ranked[0].score > ranked[1].score


async def test_llama_index(locked: Stage, url: str):
    embeddings = pytest.importorskip("llama_index.embeddings.text_embeddings_inference")
    rerankers = pytest.importorskip("llama_index.postprocessor.tei_rerank")
    from llama_index.core.schema import NodeWithScore, TextNode

    embedder = embeddings.TextEmbeddingsInference(EMBED_MODEL, base_url=url, auth_token=SECRET)
    found = await asyncio.to_thread(embedder.get_text_embedding_batch, TEXTS)
    np.testing.assert_allclose(found, await vectors(locked), rtol=1e-5)
    # The reranker sends the whole header.
    ranker = rerankers.TextEmbeddingInference(base_url=url, auth_token=f"Bearer {SECRET}", top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    ranked = await asyncio.to_thread(ranker.postprocess_nodes, nodes, query_str="what")
    assert len(ranked) == 2 and ranked[0].score > ranked[1].score


async def test_litellm(locked: Stage, url: str):
    litellm = pytest.importorskip("litellm")
    # Without a task it asks Hugging Face for that of the model.
    asked = {"model": f"huggingface/{EMBED_MODEL}", "input_type": "embed", "api_base": url, "api_key": SECRET}
    answer = await asyncio.to_thread(litellm.embedding, input=TEXTS[:2], **asked)
    found = np.array([row["embedding"] for row in answer.data])
    np.testing.assert_allclose(found, (await vectors(locked))[:2], rtol=1e-5)
