"""What a request says of itself, on its way through vLLM."""

import pytest

from backends.vllm.plugin.request_metadata import Defaults, make_engine_request, metadata_of
from controlplane.core.clock import Instant
from controlplane.core.generation import FIRST_HANDOFF, Handoff
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo

NOW = Instant(9_000)
CLASS = ServiceClass("any", Slo(), 0, sheddable=False)
REQUEST = Request("r", Kind.GENERATE, "m", "t", CLASS, CLASS.slo, Instant(1_000), 20, 100)


def read(said, *, prompt_tokens: int):
    """By an engine that was given the prompt, and what is left of the limit."""
    left = 120 - prompt_tokens
    return make_engine_request(
        said, Defaults(), request_id="r", prompt_tokens=prompt_tokens, max_tokens=left, now=NOW
    )


def test_what_came_with_the_prompt_counts_as_answer_and_as_memory():
    standing = Handoff(done=7, first_token=Instant(2_000), last_token=Instant(3_000))
    resumed = read(metadata_of(REQUEST, standing), prompt_tokens=27)
    assert (resumed.request.prompt_tokens, resumed.done, resumed.tokens) == (20, 7, 27)
    assert (resumed.request.arrival, resumed.first_token, resumed.last_token) == (1_000, 2_000, 3_000)
    assert resumed.request.max_output_tokens == 100
    resumed.stamp(NOW, 1)
    assert (resumed.done, resumed.tokens) == (8, 28)


@pytest.mark.parametrize("said", [metadata_of(REQUEST, FIRST_HANDOFF), {"resumed_tokens": -5}])
def test_who_resumes_nothing_has_its_answer_before_it(said):
    fresh = read(said, prompt_tokens=20)
    assert (fresh.request.prompt_tokens, fresh.done, fresh.tokens) == (20, 0, 20)
    assert fresh.first_token is None


def test_what_is_said_of_two_alike_is_read_once():
    said = {"levels": [0, 0.5, 1], "quantiles": [10, 60, 200]}
    one, other = read(said, prompt_tokens=20), read({**said, "quantiles": [10, 60.0, 200]}, prompt_tokens=20)
    longer = read({**said, "quantiles": [10, 60, 201]}, prompt_tokens=20)
    assert one.forecast is other.forecast
    assert longer.forecast is not None and longer.forecast.tokens == (10.0, 60.0, 201.0)
