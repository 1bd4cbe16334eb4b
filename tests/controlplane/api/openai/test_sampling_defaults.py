"""A model's sampling defaults are for what a request leaves out; an operator's limit bounds every request."""

from typing import Any

import pytest

from controlplane.core.generation import Sampling, SamplingDefaults
from controlplane.service.gate.token_stream import is_resumable
from controlplane.service.request_jobs import Caller, RequestOrigin
from tests.controlplane.api.scripted_server import CHAT_MODEL, Stage

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"model": CHAT_MODEL, "prompt": "hi"},
}


@pytest.mark.parametrize(
    ("path", "stated", "expected"),
    [
        (CHAT, {}, 20),
        (CHAT, {"max_tokens": None}, 20),
        (CHAT, {"max_tokens": 30}, 30),
        (CHAT, {"max_completion_tokens": 60}, 40),
        # OpenAI's default for text completions counts as stated.
        (TEXT, {}, 16),
        (TEXT, {"max_tokens": None}, 16),
        (TEXT, {"max_tokens": 60}, 40),
    ],
)
async def test_limit(stage: Stage, path: str, stated: dict[str, int | None], expected: int):
    stage.generator.sampling_defaults = SamplingDefaults(max_tokens=20, max_tokens_limit=40)
    answer = await stage.http.post(path, json=BODIES[path] | stated)
    assert answer.status_code == 200, answer.text
    [run] = stage.generator.runs
    assert run.sampling is not None
    # The lease and the forecast are bounded by the same limit.
    assert run.sampling.max_tokens == run.request.max_output_tokens == expected


async def test_default_limit_is_bounded_by_the_context(stage: Stage):
    stage.generator.sampling_defaults = SamplingDefaults(max_tokens=20)
    messages = [{"role": "user", "content": "x" * 250}]
    answer = await stage.http.post(CHAT, json=BODIES[CHAT] | {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert stage.generator.runs[0].request.max_output_tokens == 6


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("stated", "expected"), [(None, 1.5), (0, 0.0), (-1, -1.0)])
async def test_penalties(stage: Stage, path: str, stated: float | None, expected: float):
    body = BODIES[path] | {"presence_penalty": stated, "frequency_penalty": stated}
    assert (await stage.http.post(path, json=body)).status_code == 200
    stage.generator.sampling_defaults = SamplingDefaults(presence_penalty=1.5, frequency_penalty=1.5)
    assert (await stage.http.post(path, json=body)).status_code == 200
    found = [
        run.sampling and (run.sampling.presence_penalty, run.sampling.frequency_penalty)
        for run in stage.generator.runs
    ]
    assert found == [(stated, stated), (expected, expected)]


@pytest.mark.parametrize(
    ("defaults", "stated", "expected"),
    [
        (SamplingDefaults(), None, True),
        (SamplingDefaults(), 0.5, False),
        (SamplingDefaults(presence_penalty=1.5), None, False),
        (SamplingDefaults(presence_penalty=1.5), 0.0, True),
    ],
)
async def test_request_with_a_penalty_is_not_preempted(
    stage: Stage, defaults: SamplingDefaults, stated: float | None, *, expected: bool
):
    stage.generator.sampling_defaults = defaults
    job = await stage.service.intake.completion(
        RequestOrigin("test", Caller("tests")), CHAT_MODEL, "hi", max_tokens=4,
        sampling=Sampling(4, presence_penalty=stated),
    )  # fmt: skip
    assert is_resumable(job) == expected
