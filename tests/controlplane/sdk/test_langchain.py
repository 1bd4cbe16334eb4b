"""The LangChain classes: LangChain's own suite against the real server, and the reranker."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Thread
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from controlplane import sdk
from controlplane.sdk.langchain import TandemEmbeddings, TandemRerank
from tests.controlplane.api.scripted_server import EMBED_MODEL, listening, staged
from tests.controlplane.sdk.scripted_http import Server, vectors

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with an event loop of its own, because some tests block theirs."""
    address: Future[str] = Future()

    async def serve() -> None:
        end = asyncio.Event()
        async with staged() as stage, listening(stage.app) as found:
            address.set_result((found, asyncio.get_running_loop(), end))  # type: ignore[arg-type]
            await end.wait()

    thread = Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    found, loop, end = address.result(60)
    yield found
    loop.call_soon_threadsafe(end.set)
    thread.join()


class Suite:
    @property
    def embeddings_class(self) -> type[TandemEmbeddings]:
        return TandemEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"client": sdk.Tandem(), "model": EMBED_MODEL}


class TestEmbeddingsUnit(Suite, EmbeddingsUnitTests):
    pass


class TestEmbeddingsIntegration(Suite, EmbeddingsIntegrationTests):
    @pytest.fixture
    def model(self, url: str) -> Iterator[TandemEmbeddings]:
        with sdk.Tandem(url) as client:
            yield TandemEmbeddings(client=client, model=EMBED_MODEL)


def test_queries_and_documents_have_prompts_of_their_own():
    server = Server(
        lambda _, body: vectors([[1.0]] * (1 if isinstance(body["input"], str) else len(body["input"])))
    )
    with sdk.Tandem(transport=server) as client:
        found = TandemEmbeddings(
            client=client, model="e", query_prompt="query", document_prompt="passage", dimensions=4
        )
        assert found.embed_query("why") == [1.0]
        assert found.embed_documents(["a", "b"]) == [[1.0], [1.0]]
    assert [(body["input"], body["prompt_name"], body["dimensions"]) for body in server.bodies] == [
        ("why", "query", 4),
        (["a", "b"], "passage", 4),
    ]


async def test_the_reranker_keeps_the_best_documents():
    results = [{"index": 2, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]
    server = Server(lambda *_: {"results": results})
    documents = [Document(text, metadata={"page": page}) for page, text in enumerate("abc")]
    with sdk.Tandem(transport=server) as client:
        rerank = TandemRerank(client=client, model="r", top_n=2, service_class="gold")
        with sdk.deadline(ms=60_000):
            found = await rerank.acompress_documents(documents, "why")
        assert rerank.compress_documents([], "why") == []
    assert [(one.page_content, one.metadata) for one in found] == [
        ("c", {"page": 2, "relevance_score": 0.9}),
        ("a", {"page": 0, "relevance_score": 0.1}),
    ]
    assert documents[2].metadata == {"page": 2}
    assert [(body["top_n"], body["service_class"]) for body in server.bodies] == [(2, "gold")]
    assert 0 < float(server.requests[0].headers["x-slo-e2e-ms"]) <= 60_000
