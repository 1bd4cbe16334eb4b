"""The forecast of embedding tokens that have not arrived yet."""

from controlplane.core.clock import Instant, seconds
from controlplane.core.request import Kind
from controlplane.service.memory.demand_forecast import EmbeddingDemand
from tests.example_requests import a_request


def trained(demand: EmbeddingDemand) -> EmbeddingDemand:
    """Thirty seconds with 500 embedding tokens and one generation request each."""
    for second in range(30):
        demand.observe_arrival(a_request(kind=Kind.EMBED, prompt_tokens=500), Instant(seconds(second)))
        demand.observe_arrival(a_request(prompt_tokens=7_000), Instant(seconds(second)))
    return demand


def test_forecasts_follow_past_embedding_tokens():
    assert trained(EmbeddingDemand(seconds(1), 0.9)).tokens(Instant(seconds(30))) == 500


def test_nothing_is_forecast_without_a_level_or_a_history():
    assert trained(EmbeddingDemand(seconds(1), None)).tokens(Instant(seconds(30))) == 0
    assert EmbeddingDemand(seconds(1), 0.9).tokens(Instant(seconds(30))) == 0
