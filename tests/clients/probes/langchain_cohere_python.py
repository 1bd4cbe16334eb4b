import cohere
import probe
from langchain_cohere import CohereRerank

SERVER = {"cohere_api_key": probe.KEY, "base_url": probe.url(), "top_n": len(probe.TEXTS)}


def rerank() -> None:
    found = CohereRerank(model=probe.RERANKER, **SERVER).rerank(probe.TEXTS, "What is scarce?")
    probe.check_ranks([one["index"] for one in found], [one["relevance_score"] for one in found])


def errors() -> None:
    wrong = CohereRerank(model="nobody", **SERVER)
    body = probe.refused(
        lambda: wrong.rerank(probe.TEXTS, "What?"), cohere.NotFoundError, lambda error: error.body
    )
    assert body["error"]["code"] == "model_not_found"


probe.run({"rerank": rerank, "errors": errors})
