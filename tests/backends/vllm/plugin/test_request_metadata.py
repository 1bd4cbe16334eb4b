"""Request metadata survives its way through vLLM's sampling parameters."""

from dataclasses import replace

import pytest

from backends.vllm.plugin.request_metadata import Defaults, defaults_of, make_engine_request, metadata_of
from controlplane.core.clock import Instant, milliseconds
from controlplane.core.generation import FIRST_HANDOFF, Handoff
from controlplane.core.slo import ServiceClass, Slo
from tests.example_requests import a_request

NOW = Instant(9_000)
REQUEST = a_request("r", 20, 100, arrival=Instant(1_000))


def read(metadata, *, prompt_tokens: int):
    """Parses metadata as an engine does that got the prompt and the remaining token limit."""
    left = 120 - prompt_tokens
    return make_engine_request(
        metadata, Defaults(), request_id="r", prompt_tokens=prompt_tokens, max_tokens=left, now=NOW
    )


def test_resumed_tokens_count_as_output_and_as_memory():
    handoff = Handoff(resumed_tokens=7, first_token=Instant(2_000), last_token=Instant(3_000))
    resumed = read(metadata_of(REQUEST, handoff), prompt_tokens=27)
    assert (resumed.request.prompt_tokens, resumed.done, resumed.tokens) == (20, 7, 27)
    assert (resumed.request.arrival, resumed.first_token, resumed.last_token) == (1_000, 2_000, 3_000)
    assert resumed.request.max_output_tokens == 100
    resumed.stamp(NOW, 1)
    assert (resumed.done, resumed.tokens) == (8, 28)


@pytest.mark.parametrize("metadata", [metadata_of(REQUEST, FIRST_HANDOFF), {"resumed_tokens": -5}])
def test_a_new_request_has_no_output_yet(metadata):
    fresh = read(metadata, prompt_tokens=20)
    assert (fresh.request.prompt_tokens, fresh.done, fresh.tokens) == (20, 0, 20)
    assert fresh.first_token is None


def test_every_objective_reaches_the_engine():
    slo = Slo(*map(milliseconds, (500, 40, 9_000, 250)))
    sent = metadata_of(replace(REQUEST, slo=slo), FIRST_HANDOFF)
    assert sent["gap_ms"] == 250
    assert read(sent, prompt_tokens=20).request.slo == slo
    default = defaults_of({"gap_ms": 100, "tpot_ms": 30})
    facts = {"request_id": "r", "prompt_tokens": 20, "max_tokens": 100, "now": NOW}
    assert make_engine_request({"tpot_ms": 40}, default, **facts).request.slo == Slo(
        tpot=milliseconds(40), gap=milliseconds(100)
    )


def test_equal_forecasts_share_one_object():
    metadata = {"levels": [0, 0.5, 1], "quantiles": [10, 60, 200]}
    one, other = (
        read(metadata, prompt_tokens=20),
        read({**metadata, "quantiles": [10, 60.0, 200]}, prompt_tokens=20),
    )
    longer = read({**metadata, "quantiles": [10, 60, 201]}, prompt_tokens=20)
    assert one.forecast is other.forecast
    assert longer.forecast is not None and longer.forecast.tokens == (10.0, 60.0, 201.0)


@pytest.mark.parametrize(("priority", "stated", "weight"), [(0, None, 1.0), (10, None, 11.0), (10, 2.5, 2.5)])
def test_the_weight_of_a_class_reaches_the_engine(priority, stated, weight):
    service_class = ServiceClass("any", Slo(), priority, sheddable=False, stated_weight=stated)
    request = replace(REQUEST, service_class=service_class)
    assert read(metadata_of(request, FIRST_HANDOFF), prompt_tokens=20).weight == weight


def test_a_default_weight_applies_to_requests_that_state_none():
    defaults = defaults_of({"weight": 4, "priority": 2})
    facts = {"request_id": "r", "prompt_tokens": 20, "max_tokens": 100, "now": NOW}
    assert make_engine_request({}, defaults, **facts).weight == 4
    assert make_engine_request({"weight": "0.5"}, defaults, **facts).weight == 0.5


@pytest.mark.parametrize("weight", ["much", 0, float("nan")])
def test_a_weight_that_is_no_number_in_range_is_an_error(weight):
    with pytest.raises(ValueError, match="weight="):
        read({"weight": weight}, prompt_tokens=20)


@pytest.mark.parametrize(
    "metadata",
    [
        {"ttft_ms": float("inf")},
        {"e2e_ms": "-inf"},
        {"tpot_ms": 1e300},
        {"priority": 1e30},
        {"arrival_ns": float("inf")},
        {"tokens": "inf"},
        {"levels": [0, 1], "quantiles": [1, float("inf")]},
        {"levels": [0, 1], "quantiles": [-1e300, 1]},
    ],
)
def test_a_number_that_no_policy_can_hold_is_an_error(metadata):
    """The engine would end with any other exception, in the intake or in a later step."""
    with pytest.raises(ValueError, match=r"^tandem\."):
        read(metadata, prompt_tokens=20)
