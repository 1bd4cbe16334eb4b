"""Vectors come back for each input in order, in both encodings, as long as was asked."""

from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from tests.controlplane.api.stage import EMBED_MODEL, Stage

EMBED = "/v1/embeddings"


def embed(**fields: Any) -> dict[str, Any]:
    return {"model": EMBED_MODEL, "input": "hi"} | fields


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
    assert [(row["object"], row["index"]) for row in body["data"]] == [
        ("embedding", index) for index in range(len(tokens))
    ]
    assert [row["embedding"] for row in body["data"]] == [stage.embedder.vector(ids) for ids in tokens]
    count = sum(map(len, tokens))
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (body["object"], body["model"]) == ("list", EMBED_MODEL)
    assert answer.headers["x-tandem-decision"] == "ADMIT"


async def test_base64_is_little_endian_float32(stage: Stage):
    plain = (await stage.http.post(EMBED, json=embed())).json()
    coded = (await stage.http.post(EMBED, json=embed(encoding_format="base64"))).json()
    vector = np.frombuffer(b64decode(coded["data"][0]["embedding"]), dtype="<f4")
    assert vector.tolist() == plain["data"][0]["embedding"]


async def test_dimensions_are_honoured_at_unit_length(stage: Stage):
    whole = (await stage.http.post(EMBED, json=embed(dimensions=8))).json()["data"][0]["embedding"]
    short = (await stage.http.post(EMBED, json=embed(dimensions=4))).json()["data"][0]["embedding"]
    assert whole == stage.embedder.vector(b"hi")
    assert short == pytest.approx(np.array(whole[:4]) / np.linalg.norm(whole[:4]), rel=1e-6)


async def test_the_most_inputs_come_back_in_order(stage: Stage):
    body = (await stage.http.post(EMBED, json=embed(input=[[7, n % 50] for n in range(2048)]))).json()
    assert [row["embedding"][2] for row in body["data"]] == [n % 50 for n in range(2048)]


async def test_truncation_to_the_maximum_is_accepted_and_changes_nothing_that_fits(stage: Stage):
    answer = await stage.http.post(EMBED, json=embed(truncate_prompt_tokens=-1))
    assert answer.json()["data"][0]["embedding"] == stage.embedder.vector(b"hi")
