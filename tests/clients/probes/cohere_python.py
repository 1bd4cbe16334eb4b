import cohere
import probe

client = cohere.ClientV2(api_key=probe.KEY, base_url=probe.url())


def rerank() -> None:
    answer = client.rerank(model=probe.RERANKER, query="What is scarce?", documents=probe.TEXTS)
    probe.check_ranks([row.index for row in answer.results], [row.relevance_score for row in answer.results])


def errors() -> None:
    try:
        client.rerank(model="nobody", query="What?", documents=probe.TEXTS)
    except cohere.NotFoundError as error:
        assert error.body["error"]["code"] == "model_not_found"
    else:
        raise AssertionError("an unknown model was served")


probe.run({"rerank": rerank, "errors": errors})
