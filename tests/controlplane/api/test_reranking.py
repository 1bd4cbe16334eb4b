"""Reranking and scoring in the shapes of Cohere, Jina, vLLM and text-embeddings-inference."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from controlplane.api.settings import ANONYMOUS
from controlplane.core.errors import BackendFailed, NoMemory
from controlplane.service.request_jobs import RequestOrigin, TextPairs
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, RERANK_MODEL, Stage, staged

DOCUMENTS = ["first", {"text": "second", "page": 2}, ""]
TEXTS = ["first", "second", ""]


def rerank(**fields: Any) -> dict[str, Any]:
    return {"model": RERANK_MODEL, "query": "what", "documents": DOCUMENTS} | fields


async def rows(stage: Stage) -> np.ndarray:
    """Scores and logits that the scripted model gives TEXTS."""
    pairs = TextPairs(["what"], TEXTS)
    origin = RequestOrigin("expected", ANONYMOUS)
    job = await stage.service.intake.pairs.job(origin, RERANK_MODEL, pairs, None)
    found = (await stage.service.gate.embed(job)).vectors
    stage.reranker.runs.clear()
    return found


def ranking(scores) -> list[int]:
    return sorted(range(len(scores)), key=lambda at: -scores[at])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked_by_score(stage: Stage, path: str):
    scores = (await rows(stage))[:, 0]
    answer = await stage.http.post(path, json=rerank())
    body = answer.json()
    assert answer.status_code == 200, answer.text
    assert [one["index"] for one in body["results"]] == ranking(scores)
    for one in body["results"]:
        assert one["relevance_score"] == pytest.approx(float(scores[one["index"]]))
        given = DOCUMENTS[one["index"]]
        assert one["document"] == ({"text": given} if isinstance(given, str) else given)
    tokens = 3 * len("what") + sum(map(len, TEXTS))
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == tokens
    assert body["meta"] == {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": tokens}}
    assert (body["model"], body["id"]) == (RERANK_MODEL, f"rerank-{answer.headers['x-request-id']}")
    assert answer.headers["x-tandem-decision"] == "ADMIT"
    [run] = stage.reranker.runs
    assert run.request.sequences == 3


async def test_the_best_documents_without_their_texts(stage: Stage):
    scores = (await rows(stage))[:, 0]
    answer = await stage.http.post("/v1/rerank", json=rerank(top_n=2, return_documents=False))
    found = [(one["index"], one.get("document")) for one in answer.json()["results"]]
    assert found == [(index, None) for index in ranking(scores)[:2]]


async def test_a_hundred_documents_are_one_request_with_one_deadline(stage: Stage):
    answer = await stage.http.post(
        "/v1/rerank", json=rerank(documents=["text"] * 100), headers={"x-slo-e2e-ms": "60000"}
    )
    assert answer.status_code == 200
    [run] = stage.reranker.runs
    assert (len(run.inputs), run.request.sequences) == (100, 100)
    assert run.deadline is not None
    lines = (await stage.http.get("/metrics")).text.splitlines()
    total = [line for line in lines if line.startswith("tandem_requests_total") and 'kind="embed"' in line]
    assert sum(float(line.split()[-1]) for line in total) == 1.0


async def test_pairs_are_cut_as_cross_encoders_do_unless_told_otherwise(stage: Stage):
    long = "x" * 100
    await stage.http.post("/v1/rerank", json=rerank(documents=[long, "short"]))
    await stage.http.post("/v1/rerank", json=rerank(documents=[long], truncate_prompt_tokens=10))
    await stage.http.post("/v1/rerank", json=rerank(documents=[long], max_tokens_per_doc=3))
    ask = rerank(documents=["x" * 50 + "y"], truncate_prompt_tokens=9, truncation_side="left")
    await stage.http.post("/v1/rerank", json=ask)
    found = [[bytes(ids) for ids in run.inputs] for run in stage.reranker.runs]
    assert found == [
        [b"what" + b"x" * 60, b"whatshort"], [b"what" + b"x" * 6], [b"whatxxx"], [b"whatxxxxy"]
    ]  # fmt: skip


DEFAULTS = {
    "top_n": 0,
    "max_tokens_per_query": 0,
    "max_tokens_per_doc": 0,
    "priority": 0,
    "padding": "do_not_pad",
}
NULLS = dict.fromkeys(
    (
        *("cache_salt", "chat_template_kwargs", "instruction", "mm_processor_kwargs", "padding", "priority"),
        *("request_id", "truncate_prompt_tokens", "truncation_side", "use_activation", "user"),
    )
)


@pytest.mark.parametrize("fields", [DEFAULTS, NULLS])
async def test_defaults_of_vllm_change_nothing(stage: Stage, fields: dict[str, Any]):
    plain = (await stage.http.post("/v1/rerank", json=rerank())).json()
    answer = await stage.http.post("/v1/rerank", json=rerank(**fields))
    assert answer.status_code == 200, answer.text
    assert answer.json()["results"] == plain["results"]
    of_scores = {name: value for name, value in fields.items() if name != "top_n"}
    answer = await stage.http.post("/v1/score", json={"queries": "what", "documents": TEXTS} | of_scores)
    assert answer.status_code == 200, answer.text
    for path, body in (
        ("/v1/embeddings", {"model": EMBED_MODEL, "input": "a"}),
        ("/v1/completions", {"model": CHAT_MODEL, "prompt": "a", "max_tokens": 1}),
    ):
        answer = await stage.http.post(path, json=body | {"priority": 0})
        assert answer.status_code == 200, answer.text


async def test_documents_may_be_one_text(stage: Stage):
    answer = await stage.http.post("/v1/rerank", json=rerank(documents="alone"))
    assert [one["document"] for one in answer.json()["results"]] == [{"text": "alone"}]


async def test_queries_and_documents_are_cut_before_they_are_joined(stage: Stage):
    cut = {"max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    await stage.http.post("/v1/rerank", json=rerank(documents=["abcdef"], **cut))
    await stage.http.post("/v1/score", json={"queries": ["what", "none"], "items": ["abcdef", "gh"]} | cut)
    found = [[bytes(ids) for ids in run.inputs] for run in stage.reranker.runs]
    assert found == [[b"whabc"], [b"whabc", b"nogh"]]


async def test_the_answer_of_text_embeddings_inference(stage: Stage):
    logits = (await rows(stage))[:, 1]
    plain = {"query": "what", "texts": TEXTS}
    answer = await stage.http.post("/rerank", json=plain)
    assert answer.status_code == 200, answer.text
    assert [one["index"] for one in answer.json()] == ranking(logits)
    for one in answer.json():
        assert one == {"index": one["index"], "score": pytest.approx(1 / (1 + np.exp(-logits[one["index"]])))}
    raw = await stage.http.post("/rerank", json=plain | {"raw_scores": True, "return_text": True})
    assert raw.json()[0] == {
        "index": ranking(logits)[0],
        "score": pytest.approx(float(logits.max())),
        "text": TEXTS[ranking(logits)[0]],
    }


async def test_text_embeddings_inference_may_refuse_or_cut_left(stage: Stage):
    ask = {"query": "what", "texts": ["x" * 59 + "yz"]}
    left = await stage.http.post("/rerank", json=ask | {"truncation_direction": "Left"})
    assert left.status_code == 200
    assert bytes(stage.reranker.runs[0].inputs[0]).endswith(b"xyz")
    refused = (await stage.http.post("/rerank", json=ask | {"truncate": False})).json()["error"]
    assert (refused["param"], refused["code"]) == ("texts", "context_length_exceeded")
    assert refused["message"].startswith("texts[0] and query have 65 tokens; rerank-model accepts at most 64")
    ask["texts"] = ["x" * 65]
    refused = (await stage.http.post("/rerank", json=ask | {"truncate": False})).json()["error"]
    assert "texts[0] has 65 characters" in refused["message"]


async def test_the_best_texts(stage: Stage):
    """LiteLLM's provider huggingface sends top_n with texts."""
    ask = {"query": "what", "texts": TEXTS}
    whole = (await stage.http.post("/rerank", json=ask)).json()
    answer = await stage.http.post("/rerank", json=ask | {"top_n": 2, "return_text": True})
    assert answer.status_code == 200, answer.text
    assert answer.json() == [one | {"text": TEXTS[one["index"]]} for one in whole[:2]]


async def test_a_query_of_texts_has_no_limit_of_its_own(stage: Stage):
    ask = {"query": "what", "texts": TEXTS, "max_tokens_per_query": 2}
    refused = (await stage.http.post("/rerank", json=ask)).json()["error"]
    assert refused["param"] == "max_tokens_per_query"
    assert "belongs to a request with documents" in refused["message"]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_scores_of_pairs_keep_their_order(stage: Stage, path: str):
    expected = await rows(stage)
    ask = {"model": RERANK_MODEL, "text_1": "what", "text_2": TEXTS}
    answer = await stage.http.post(path, json=ask)
    body = answer.json()
    assert answer.status_code == 200, answer.text
    found = [(one["index"], one["object"], one["score"]) for one in body["data"]]
    assert found == [(at, "score", pytest.approx(float(expected[at, 0]))) for at in range(3)]
    assert (body["object"], body["model"]) == ("list", RERANK_MODEL)
    assert body["usage"]["prompt_tokens"] == 3 * len("what") + sum(map(len, TEXTS))
    logits = (await stage.http.post(path, json=ask | {"use_activation": False})).json()["data"]
    assert [one["score"] for one in logits] == pytest.approx(expected[:, 1].tolist())


SHAPES = [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")]


@pytest.mark.parametrize(("first", "second"), SHAPES)
async def test_scores_take_each_shape_of_vllm(stage: Stage, first: str, second: str):
    expected = await rows(stage)
    others = dict.fromkeys(name for shape in SHAPES for name in shape)
    answer = await stage.http.post("/v1/score", json=others | {first: "what", second: TEXTS})
    assert answer.status_code == 200, answer.text
    assert [one["score"] for one in answer.json()["data"]] == pytest.approx(expected[:, 0].tolist())
    refused = (await stage.http.post("/v1/score", json={first: ["a", "b"], second: ["c"]})).json()["error"]
    assert refused["param"] == first
    assert f"{first} has 2 texts and {second} 1" in refused["message"]


async def test_as_many_queries_as_documents(stage: Stage):
    answer = await stage.http.post("/score", json={"text_1": ["a", "b"], "text_2": ["c", "d"]})
    assert answer.status_code == 200, answer.text
    assert stage.reranker.runs[0].inputs == ((97, 99), (98, 100))
    single = await stage.http.post("/score", json={"text_1": "a", "text_2": "c"})
    assert len(single.json()["data"]) == 1


@pytest.mark.parametrize(
    ("path", "fields", "param", "code", "message"),
    [
        ("/v1/rerank", {"documents": []}, "documents", "invalid_value", "1 to 2048 strings"),
        ("/v1/rerank", {"documents": ["a", 5]}, "documents", "invalid_value", "item 1 is 5"),
        ("/v1/rerank", {"documents": [{"body": "a"}]}, "documents", "invalid_value", '{"text": …} objects'),
        ("/v1/rerank", {"documents": ["a"] * 2049}, "documents", "invalid_value", "has 2,049 items"),
        ("/v1/rerank", {"query": ""}, "query", "invalid_value", "at least 1 character"),
        ("/v1/rerank", {"query": None}, "query", "invalid_value", "valid string"),
        ("/v1/rerank", {"top_n": -1}, "top_n", "invalid_value", "greater than or equal to 0"),
        ("/v1/rerank", {"max_tokens_per_query": -1}, "max_tokens_per_query", "invalid_value", "equal to 0"),
        ("/v1/rerank", {"priority": 1}, "priority", "unsupported_parameter", "use service_class"),
        ("/v1/rerank", {"instruction": "x"}, "instruction", "unsupported_parameter", "into the query"),
        ("/v1/rerank", {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "unsupported_parameter",
         "no chat template"),
        ("/v1/rerank", {"padding": "max_length"}, "padding", "unsupported_parameter", "not padded"),
        ("/v1/rerank", {"rank_fields": ["a"]}, "rank_fields", "unsupported_parameter", "write the fields"),
        ("/v1/rerank", {"texts": ["a"]}, "texts", "unknown_parameter", "unknown field"),
        ("/v1/rerank", {"truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "invalid_value", "most 64"),
        ("/v1/rerank", {"truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "invalid_value", "least 2"),
        ("/rerank", {"documents": None}, "documents", "invalid_value", "either documents or texts"),
        ("/rerank", {"texts": ["a"]}, "documents", "invalid_value", "either documents or texts"),
        ("/rerank", {"raw_scores": True}, "raw_scores", "invalid_value", "belongs to a request with texts"),
        ("/v1/rerank", {"model": EMBED_MODEL}, "model", "invalid_value", "does not serve reranking"),
        ("/v1/rerank", {"model": CHAT_MODEL}, "model", "invalid_value", "models that do: rerank-model"),
        ("/v1/rerank", {"model": "nobody"}, "model", "model_not_found", "models for reranking: rerank-model"),
        ("/v1/rerank", {"service_class": "x"}, "service_class", "unknown_service_class", "no such class"),
    ],
)  # fmt: skip
async def test_bad_input_names_field_rule_and_remedy(stage, path, fields, param, code, message):
    answer = await stage.http.post(path, json=rerank(**fields))
    error = answer.json()["error"]
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert (error["param"], error["code"]) == (param, code)
    assert message in error["message"]
    assert not stage.reranker.runs


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "text_1 has 2 texts and text_2 3"),
        ({"text_1": [], "text_2": "a"}, "text_1", "1 to 2048 strings"),
        ({"text_1": "a"}, "text_2", "missing; it belongs to text_1"),
        ({"items": "a"}, "queries", "missing; it belongs to items"),
        ({"queries": "a"}, "documents", "missing; it belongs to queries"),
        ({}, "queries", "give queries and documents"),
        ({"queries": "a", "documents": "b", "text_1": "c"}, "text_1", "does not belong to queries"),
        ({"queries": "a", "documents": "b", "items": "c"}, "items", "does not belong to queries"),
        ({"data_1": "a", "data_2": "b", "top_n": 1}, "top_n", "unknown field"),
    ],
)
async def test_bad_scores_are_refused(stage: Stage, fields, param, message):
    answer = await stage.http.post("/v1/score", json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


async def test_vectors_are_not_made_by_a_reranker(stage: Stage):
    answer = await stage.http.post("/v1/embeddings", json={"model": RERANK_MODEL, "input": "a"})
    assert "'rerank-model' does not serve embeddings" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "invalid_value"


async def test_the_tokens_of_all_pairs_are_bounded():
    async with staged(server={"limits": {"max_pair_tokens": 100}}) as stage:
        refused = await stage.http.post("/v1/rerank", json=rerank(query="q" * 40, documents=["x"] * 3))
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, "documents", "input_too_large")
        assert (
            "3 of 3 pairs have 123 tokens already; server.limits.max_pair_tokens is 100" in error["message"]
        )
        assert (await stage.http.post("/v1/rerank", json=rerank(documents=["x"] * 3))).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NoMemory("m", position=2), 503, "out_of_memory"),
        (BackendFailed("m", position=2), 500, "backend_failed"),
    ],
)
async def test_a_document_that_fails_is_named(stage: Stage, monkeypatch, error, status, code):
    async def fail(*args, **options):
        raise error

    monkeypatch.setattr(stage.reranker, "embed", fail)
    answer = await stage.http.post("/v1/rerank", json=rerank())
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "documents[2]" in answer.json()["error"]["message"]


async def test_a_reranker_is_listed_as_one(stage: Stage):
    data = (await stage.http.get("/v1/models")).json()["data"]
    assert (data[-1]["id"], data[-1]["kind"], data[-1]["max_model_len"]) == (RERANK_MODEL, "rerank", 64)


async def test_the_schema_describes_bodies_and_answers(stage: Stage):
    schema = (await stage.http.get("/openapi.json")).json()
    post = schema["paths"]["/rerank"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "EitherRerankRequest"
    )
    either = post["responses"]["200"]["content"]["application/json"]["schema"]["anyOf"]
    assert either[0] == {"$ref": "#/components/schemas/RerankResponse"}
    assert either[1] == {"type": "array", "items": {"$ref": "#/components/schemas/RankedText"}}
    assert {"RerankResponse", "RankedText", "ScoreResponse", "ScoreRequest"} <= schema["components"][
        "schemas"
    ].keys()


async def test_a_request_whose_client_left_ends():
    """The stage checks at its end that no lease is open."""
    async with staged(is_stepped=True) as stage:
        asking = asyncio.create_task(stage.http.post("/v1/rerank", json=rerank()))
        await stage.reranker.until_runs(1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_pairs_of_large_requests_are_joined_in_one_thread(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    """Threads that hold the interpreter lock in turn keep the event loop waiting for each of them."""
    threads: set[threading.Thread] = set()
    has_begun, may_end, join = asyncio.Event(), threading.Event(), stage.reranker.pair
    loop = asyncio.get_running_loop()

    def pair(*arguments: Any) -> Sequence[int]:
        if (thread := threading.current_thread()) is not threading.main_thread():
            threads.add(thread)
            loop.call_soon_threadsafe(has_begun.set)
            may_end.wait(5)
        return join(*arguments)

    monkeypatch.setattr(stage.reranker, "pair", pair)
    large = {"query": "q" * 60, "documents": ["d"] * 300}
    first, second = (asyncio.create_task(stage.http.post("/v1/rerank", json=large)) for _ in range(2))
    await has_begun.wait()
    # It comes after the second large request.
    short = await stage.http.post("/v1/rerank", json={"query": "q", "documents": ["d"]})
    assert (short.status_code, len(threads)) == (200, 1)
    may_end.set()
    answers = await asyncio.gather(first, second)
    assert [len(answer.json()["results"]) for answer in answers] == [300, 300]
