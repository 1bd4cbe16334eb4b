"""Reranking clients of others, unmodified, over a real socket; a client that is not installed is skipped."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.controlplane.api.example_bodies import SECRET
from tests.controlplane.api.scripted_server import RERANK_MODEL, Stage, listening

pytestmark = pytest.mark.long

_DOCUMENTS = ["first", "second", "third"]


@pytest.fixture
async def url(locked: Stage) -> AsyncIterator[str]:
    async with listening(locked.app) as url:
        yield url


def falls(scores: list[float]) -> bool:
    return scores == sorted(scores, reverse=True) and len({*scores}) == len(scores)


async def test_cohere(url: str):
    cohere = pytest.importorskip("cohere")
    async with cohere.AsyncClientV2(api_key=SECRET, base_url=url) as client:
        ask = {"model": RERANK_MODEL, "query": "what", "documents": _DOCUMENTS}
        reply = await client.rerank(**ask)
        assert sorted(one.index for one in reply.results) == [0, 1, 2]
        assert falls([one.relevance_score for one in reply.results])
        assert reply.id.startswith("rerank-")
        assert reply.meta.billed_units.search_units == 1
        best = await client.rerank(**ask, top_n=1, max_tokens_per_doc=100)
        assert [one.index for one in best.results] == [reply.results[0].index]
        with pytest.raises(cohere.NotFoundError) as missing:
            await client.rerank(**ask | {"model": "nobody"})
        assert missing.value.body["error"]["code"] == "model_not_found"
    async with cohere.AsyncClient(api_key=SECRET, base_url=url) as client:
        reply = await client.rerank(**ask, return_documents=True)
        assert [one.document.text for one in reply.results] == [
            _DOCUMENTS[one.index] for one in reply.results
        ]


@pytest.mark.parametrize("provider", ["cohere", "hosted_vllm", "huggingface", "jina_ai"])
async def test_litellm(url: str, provider: str):
    litellm = pytest.importorskip("litellm")
    paths = {
        "cohere": f"{url}/v2/rerank",
        "hosted_vllm": url,
        # In the protocol of text-embeddings-inference.
        "huggingface": url,
        "jina_ai": f"{url}/v1/rerank",
    }
    reply = await litellm.arerank(
        model=f"{provider}/{RERANK_MODEL}",
        query="what",
        documents=_DOCUMENTS,
        top_n=2,
        api_base=paths[provider],
        api_key=SECRET,
    )
    assert len(reply.results) == 2
    assert falls([one["relevance_score"] for one in reply.results])


async def test_langchain(url: str):
    langchain = pytest.importorskip("langchain_cohere")
    reranker = langchain.CohereRerank(cohere_api_key=SECRET, base_url=url, model=RERANK_MODEL, top_n=2)
    ranked = await asyncio.to_thread(reranker.rerank, _DOCUMENTS, "what")
    assert len(ranked) == 2
    assert falls([one["relevance_score"] for one in ranked])


async def test_llama_index(url: str):
    llama_index = pytest.importorskip("llama_index.postprocessor.cohere_rerank")
    from llama_index.core.schema import NodeWithScore, TextNode

    ranker = llama_index.CohereRerank(api_key=SECRET, base_url=url, model=RERANK_MODEL, top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in _DOCUMENTS]
    ranked = await asyncio.to_thread(ranker.postprocess_nodes, nodes, query_str="what")
    assert len(ranked) == 2
    assert falls([one.score for one in ranked])
