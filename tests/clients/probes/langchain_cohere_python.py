import cohere
import probe
from langchain_cohere import CohereRerank

SERVER = {"cohere_api_key": probe.KEY, "base_url": probe.url(), "top_n": len(probe.TEXTS)}


def rerank() -> None:
    found = CohereRerank(model=probe.RERANKER, **SERVER).rerank(probe.TEXTS, "What is scarce?")
    probe.check_ranks([one["index"] for one in found], [one["relevance_score"] for one in found])


def errors() -> None:
    try:
        CohereRerank(model="nobody", **SERVER).rerank(probe.TEXTS, "What?")
    except cohere.NotFoundError as error:
        assert error.body["error"]["code"] == "model_not_found"
    else:
        raise AssertionError("an unknown model was served")


probe.run({"rerank": rerank, "errors": errors})
