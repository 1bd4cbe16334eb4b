"""LangChain's interfaces for embeddings and rerankers. Needs the extra `langchain`.

For chat use `ChatOpenAI(base_url=...)` of langchain-openai: the server speaks OpenAI's protocol. The
asynchronous methods run the blocking ones in a thread, which inherits the caller's `deadline` and trace.
"""

from collections.abc import Sequence
from typing import Any, Unpack

from pydantic import ConfigDict

from controlplane.sdk.call_options import EmbedOptions, RerankOptions
from controlplane.sdk.client import Tandem

try:
    from langchain_core.callbacks import Callbacks
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.embeddings import Embeddings as LangChainEmbeddings
except ImportError as error:
    remedy = "it is in Tandem's extra 'langchain'; in a clone: pip install '.[langchain]'"
    raise ImportError(f"langchain-core is not installed; {remedy}") from error


class TandemEmbeddings(LangChainEmbeddings):
    """Embeddings of a served model; documents are embedded in bulk, beyond the limit of one request.

    Args:
        client: the connection to the server.
        model: the embedding model.
        query_prompt: the model's prompt for queries, such as "query".
        document_prompt: the model's prompt for documents, such as "passage".
        options: options of every call.
    """

    def __init__(
        self,
        *,
        client: Tandem,
        model: str,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        **options: Unpack[EmbedOptions],
    ) -> None:
        self._client = client
        self._model = model
        self._for_query = _with_prompt(options, query_prompt)
        self._for_documents = _with_prompt(options, document_prompt)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Returns one vector per text."""
        batches = self._client.embed_many(texts, model=self._model, **self._for_documents)
        return [vector for batch in batches for vector in batch.vectors.tolist()]

    def embed_query(self, text: str) -> list[float]:
        """Returns the vector of a query."""
        embedded = self._client.embed(text, model=self._model, **self._for_query)
        vector: list[float] = embedded.vectors[0].tolist()
        return vector


def _with_prompt(options: EmbedOptions, prompt: str | None) -> EmbedOptions:
    return options if prompt is None else {**options, "prompt_name": prompt}


class TandemRerank(BaseDocumentCompressor):
    """Keeps the `top_n` documents most relevant to the query, with `relevance_score` in their metadata."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    client: Tandem
    model: str
    top_n: int = 3
    service_class: str | None = None

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Returns the best documents, the most relevant first."""
        if not documents:
            return []
        texts = [document.page_content for document in documents]
        options: RerankOptions = {"top_n": min(self.top_n, len(texts))}
        if self.service_class is not None:
            options["service_class"] = self.service_class
        ranked = self.client.rerank(query, texts, model=self.model, **options)
        return [_scored(documents[result.index], result.score) for result in ranked.results]


def _scored(document: Document, score: float) -> Document:
    metadata: dict[str, Any] = {**document.metadata, "relevance_score": score}
    return document.model_copy(update={"metadata": metadata})
