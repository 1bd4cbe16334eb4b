"""The 404 of a path that is not served."""

import pytest

from tests.controlplane.api.scripted_server import Stage


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("//v1/chat/completions/", "/v1/chat/completions"),
        ("/api/v1/models", "/v1/models"),
        ("/v1/health", "/health"),
        ("/v1/nope", None),
        ("/v1/", None),
    ],
)
async def test_an_unknown_path_names_the_one_that_the_base_url_missed(
    stage: Stage, path: str, meant: str | None
):
    message = (await stage.http.post(f"http://tandem.test{path}", json={})).json()["error"]["message"]
    assert ("did you mean" in message) == (meant is not None)
    assert meant is None or f"did you mean {meant}? Check the base URL" in message


@pytest.mark.parametrize("path", ["chat", "embed"])
async def test_a_path_of_an_older_client_of_cohere_names_the_newer_one(stage: Stage, path: str):
    answer = await stage.http.post(f"/v1/{path}", json={}, headers={"x-fern-sdk-name": "cohere"})
    assert answer.status_code == 404
    assert answer.json()["message"] == f"no such path; did you mean /v2/{path}? Use Cohere's ClientV2"
