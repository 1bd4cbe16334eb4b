"""Embeddings: one vector per input in order, both encodings, truncation and dimensions."""

from base64 import b64decode
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest

from tests.controlplane.api.example_bodies import EMBED, embed
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage, listening, staged


async def vectors(stage: Stage, **fields: Any) -> list[list[float]]:
    answer = await stage.http.post(EMBED, json=embed(**fields))
    assert answer.status_code == 200, answer.text
    return [row["embedding"] for row in answer.json()["data"]]


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("hi", [[104, 105]]),
        ([5, 6, 7], [[5, 6, 7]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
async def test_inputs(stage: Stage, given: Any, tokens: list[list[int]]):
    answer = await stage.http.post(EMBED, json=embed(input=given))
    body = answer.json()
    found = [(row["object"], row["index"], len(row["embedding"])) for row in body["data"]]
    assert found == [("embedding", index, 8) for index in range(len(tokens))]
    assert stage.embedder.runs[0].inputs == tuple(map(tuple, tokens))
    count = sum(map(len, tokens))
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (body["object"], body["model"]) == ("list", EMBED_MODEL)
    assert answer.headers["x-tandem-decision"] == "ADMIT"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a", "b", ""], "; item 2 is ''; change it"),
        (["a", None], "; item 1 is None; change it"),
        ([[1], "a"], "; item 1 is 'a'; change it"),
        (["a"] * 2049, "; the list has 2,049 items; change it"),
        ([[1]] * 2049, "; the list has 2,049 items; change it"),
        ([1, -1], "; item 1 is -1; change it"),
        ([True], "; item 0 is True; change it"),
        ([1.5], "; item 0 is 1.5; change it"),
        ([[1], [2, -3]], "; item 1[1] is -3; change it"),
        ([[1], [2, "a"]], "; item 1[1] is 'a'; change it"),
        ([["a"]], "; item 0[0] is 'a'; change it"),
        ([[[1]]], "; item 0[0] is [1]; change it"),
        ("", "of token ids; change it"),
    ],
)
async def test_invalid_item_is_named(stage: Stage, given: Any, message: str):
    answer = await stage.http.post(EMBED, json=embed(input=given))
    assert answer.json()["error"]["message"].endswith(message)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ([101, 5, 102], 200),
        ([[101, 102], [101, 5, 102]], 200),
        ("text", 200),
        ([5, 6], 400),
        ([101, 5], 400),
        ([5, 102], 400),
        ([[101, 5, 102], [5]], 400),
    ],
)
async def test_token_ids_of_another_tokenizer_are_refused(stage: Stage, given: Any, status: int):
    stage.embedder.special_tokens = (101,), (102,)
    answer = await stage.http.post(EMBED, json=embed(input=given))
    assert answer.status_code == status
    if status == 400:
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("input", "foreign_token_ids")
        assert "check_embedding_ctx_length=False" in error["message"]
        assert not stage.embedder.runs
        again = await stage.http.post(EMBED, json=embed(input=given, token_ids="as-given"))
        assert again.status_code == 200
        for value, outcome in (("as-given", 200), ("yes", 400)):
            headers = {"x-token-ids": value}
            by_header = await stage.http.post(EMBED, json=embed(input=given), headers=headers)
            assert by_header.status_code == outcome
        assert by_header.json()["error"]["param"] == "x-token-ids"


async def test_ids_are_taken_where_the_tokenizer_adds_no_special_tokens(stage: Stage):
    stage.embedder.special_tokens = (), ()
    assert (await stage.http.post(EMBED, json=embed(input=[5, 6]))).status_code == 200


async def test_langchains_default_is_refused_with_its_option(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    """LangChain sends ids of OpenAI's cl100k, which a stand-in makes here: the real one is downloaded."""
    langchain_openai, tiktoken = pytest.importorskip("langchain_openai"), pytest.importorskip("tiktoken")
    encoding = SimpleNamespace(
        encode_ordinary=lambda text: [len(word) for word in text.split()],
        encode=lambda text, **_: [len(word) for word in text.split()],
    )

    def unknown(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(tiktoken, "encoding_for_model", unknown)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: encoding)
    stage.embedder.special_tokens = (101,), (102,)
    async with listening(stage.app) as url:
        options = {"model": EMBED_MODEL, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
        by_default = langchain_openai.OpenAIEmbeddings(**options)
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False") as refused:
            await by_default.aembed_documents(["three word text"])
        assert refused.value.code == "foreign_token_ids"
        assert not stage.embedder.runs
        embedder = langchain_openai.OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
        assert len(await embedder.aembed_documents(["three word text"])) == 1


@pytest.mark.parametrize("given", [[5, 300], [[5], [300]]])
async def test_unknown_token_ids_are_refused_before_admission(stage: Stage, given: Any):
    stage.embedder.vocabulary = 300
    answer = await stage.http.post(EMBED, json=embed(input=given))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "input", "invalid_value")
    assert error["message"].endswith(
        "has token id 300; the highest of embed-model is 299. Use the model's own tokenizer."
    )
    lines = (await stage.http.get("/metrics")).text.splitlines()
    assert {one.split()[-1] for one in lines if one.startswith("tandem_requests_total{")} == {"0.0"}


async def test_base64_is_little_endian_float32(stage: Stage):
    [plain] = await vectors(stage)
    [coded] = await vectors(stage, encoding_format="base64")
    decoded = np.frombuffer(b64decode(coded), dtype="<f4")
    assert decoded.tolist() == np.float32(plain).tolist()


async def test_null_encoding_format_is_accepted(stage: Stage):
    assert await vectors(stage, encoding_format=None) == await vectors(stage)


async def test_dimensions_are_truncated_to_unit_length(stage: Stage):
    [plain] = await vectors(stage)
    [whole] = await vectors(stage, dimensions=8)
    [short] = await vectors(stage, dimensions=4)
    assert whole == plain
    assert short == pytest.approx(np.array(whole[:4]) / np.linalg.norm(whole[:4]), rel=1e-5)


async def test_predictor_gets_the_full_vector_whatever_the_dimensions():
    async with staged(predictors={"encoder": EMBED_MODEL}) as stage:
        [whole] = await vectors(stage)
        [short] = await vectors(stage, dimensions=4)
        message = {"role": "user", "content": "hi"}
        await stage.http.post("/v1/chat/completions", json={"model": CHAT_MODEL, "messages": [message]})
        features = stage.generator.runs[0].request.features
        await vectors(stage, input="hi!", truncate_prompt_tokens=1)
        message = {"role": "user", "content": "hi!"}
        await stage.http.post("/v1/chat/completions", json={"model": CHAT_MODEL, "messages": [message]})
        of_the_cut = stage.generator.runs[1].request.features
    assert len(short) == 4
    assert of_the_cut is not None
    assert of_the_cut.vector == b"", "the vector of its first letter is not its own"
    assert features is not None
    assert np.frombuffer(features.vector, np.float16).tolist() == np.float16(whole).tolist()


async def test_maximum_number_of_inputs_keeps_its_order(stage: Stage):
    inputs = [[7, number % 50] for number in range(2048)]
    alone = {number: (await vectors(stage, input=[[7, number]]))[0] for number in range(50)}
    assert await vectors(stage, input=inputs) == [alone[number] for _, number in inputs]


@pytest.mark.parametrize(
    ("given", "fields", "left"),
    [
        ("abcdef", {"truncate_prompt_tokens": 3}, "abc"),
        ("abcdef", {"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ("abcdef", {"truncate_prompt_tokens": 3, "truncation_side": "left"}, "def"),
        ("abc", {"truncate_prompt_tokens": 3, "truncation_side": "left"}, "abc"),
        ([5, 6, 7], {"truncate_prompt_tokens": 2}, [5, 6]),
        ("x" * 65, {"truncate_prompt_tokens": -1}, "x" * 64),
        ("x" * 63 + "yz", {"truncate_prompt_tokens": -1, "truncation_side": "left"}, "x" * 62 + "yz"),
    ],
)
async def test_long_inputs_are_truncated_on_the_requested_side(
    stage: Stage, given: Any, fields: dict[str, Any], left: Any
):
    assert await vectors(stage, input=given, **fields) == await vectors(stage, input=left)


async def test_usage_counts_tokens_after_truncation(stage: Stage):
    body = embed(input=["abcdef", "ab"], truncate_prompt_tokens=3)
    assert (await stage.http.post(EMBED, json=body)).json()["usage"]["prompt_tokens"] == 5


async def test_whitespace_is_a_valid_input(stage: Stage):
    assert len(await vectors(stage, input=[" \n", "a"])) == 2


async def test_prompt_name_applies_to_texts_only(stage: Stage):
    stage.embedder.prompts = {"query": "q: "}
    assert await vectors(stage, input="hi", prompt_name="query") == await vectors(stage, input="q: hi")
    for refused in ({"prompt_name": "poem"}, {"prompt_name": "query", "input": [5, 6]}, {"prompt_name": ""}):
        answer = await stage.http.post(EMBED, json=embed(**refused))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt_name"


@pytest.mark.parametrize(
    ("field", "remedy"),
    [
        ("input_type", "prompt_name"),
        ("truncate", "truncate_prompt"),
        ("truncation_direction", "truncation_side"),
    ],
)
async def test_fields_of_other_servers_are_refused_with_the_name_here(stage: Stage, field: str, remedy: str):
    answer = await stage.http.post(EMBED, json=embed(**{field: "query"}))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_parameter"
    assert remedy in answer.json()["error"]["message"]


async def test_embeddings_have_no_tpot_objective(stage: Stage):
    await vectors(stage, slo={"ttft_ms": 60_000, "tpot_ms": 50})
    found = (await stage.http.get("/metrics")).text
    kept = [line for line in found.splitlines() if line.startswith("tandem_slo_attained_total{")]
    assert [line for line in kept if 'objective="ttft"' in line]
    assert not [line for line in kept if 'objective="tpot"' in line]
