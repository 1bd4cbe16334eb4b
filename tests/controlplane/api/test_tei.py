"""/embed and / in the shape of text-embeddings-inference; its /rerank is in test_reranking."""

from typing import Any

import numpy as np
import pytest

from backends.testing import scripted
from controlplane.core.errors import Refused
from controlplane.service.gate.request_builder import named_backend
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage

PATH = "/embed"


@pytest.mark.parametrize("path", [PATH, "/"])
@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [
        ("hi", [b"hi"]),
        (["a", "bc"], [b"a", b"bc"]),
        ([5, 6], [b"\5\6"]),
        ([[5], [6]], [b"\5", b"\6"]),
    ],
)
async def test_the_answer_is_a_list_of_vectors_of_unit_length(
    stage: Stage, path: str, inputs: Any, tokens: list[bytes]
):
    answer = await stage.http.post(path, json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    assert [bytes(ids) for ids in stage.embedder.runs[0].inputs] == tokens
    assert answer.headers["x-tandem-decision"] == "ADMIT"
    plain = await stage.http.post("/v1/embeddings", json={"model": EMBED_MODEL, "input": inputs})
    expected = np.array([row["embedding"] for row in plain.json()["data"]])
    np.testing.assert_allclose(answer.json(), expected, rtol=1e-5)
    named = {"inputs": inputs, "model": EMBED_MODEL, "normalize": True, "service_class": "standard"}
    assert (await stage.http.post(path, json=named)).json() == answer.json()


async def test_vectors_have_unit_length_unless_the_request_says_otherwise(stage: Stage, monkeypatch):
    """Haystack sends `normalize: false` by default."""
    unit = scripted._vector
    monkeypatch.setattr(scripted, "_vector", lambda ids, dimension: 3 * unit(ids, dimension))
    for fields, length in (
        ({}, 1),
        ({"normalize": None}, 1),
        ({"normalize": True}, 1),
        ({"normalize": False}, 3),
    ):
        answer = await stage.http.post(PATH, json={"inputs": ["a", "bc"]} | fields)
        np.testing.assert_allclose(np.linalg.norm(answer.json(), axis=1), length, rtol=1e-5)


async def test_a_long_input_is_cut_only_if_the_request_says_so(stage: Stage):
    long = "x" * 63 + "yz"
    refused = await stage.http.post(PATH, json={"inputs": ["a", long]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "inputs", "context_length_exceeded")
    assert "inputs[1]" in error["message"]
    for direction, kept in ((None, b"xxy"), ("Right", b"xxy"), ("Left", b"xyz")):
        fields = {} if direction is None else {"truncation_direction": direction}
        body = {"inputs": long, "truncate": True} | fields
        assert (await stage.http.post(PATH, json=body)).status_code == 200
        assert bytes(stage.embedder.runs[-1].inputs[0]).endswith(kept)
    short = await stage.http.post(PATH, json={"inputs": "hi", "dimensions": 4})
    assert np.shape(short.json()) == (1, 4)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "inputs", "add it"),
        ({"inputs": []}, "inputs", "expected a non-empty string"),
        ({"inputs": ["a", ""]}, "inputs", "item 1 is ''"),
        ({"inputs": "a", "normalize": "no"}, "normalize", "boolean"),
        ({"inputs": "a", "dimensions": 3}, "dimensions", "supports"),
        ({"inputs": "a", "input": "a"}, "input", "did you mean inputs?"),
        ({"inputs": "a", "model": CHAT_MODEL}, "model", "does not serve embeddings"),
        ({"inputs": "a", "prompt_name": "poem"}, "prompt_name", "poem"),
    ],
)
async def test_bad_input_names_field_rule_and_remedy(stage: Stage, body: Any, param: str, message: str):
    answer = await stage.http.post(PATH, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert not stage.embedder.runs


def test_the_model_has_to_be_named_where_none_is_the_only_one():
    for table in ({}, {"a": 1, "b": 2}):
        with pytest.raises(Refused, match="not exactly one model serves embeddings") as caught:
            named_backend(table, None, "embeddings", others=[])
        assert (caught.value.param, caught.value.code) == ("model", "missing_required_parameter")


async def test_token_ids_of_another_tokenizer_need_the_header(stage: Stage):
    stage.embedder.special_tokens = (101,), (102,)
    body = {"inputs": [[5, 6]]}
    refused = await stage.http.post(PATH, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "foreign_token_ids")
    assert (await stage.http.post(PATH, json=body, headers={"x-token-ids": "as-given"})).status_code == 200
