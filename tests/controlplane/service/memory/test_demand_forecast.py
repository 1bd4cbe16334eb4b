"""Memory reserved for requests that have not arrived yet."""

from controlplane.core.clock import Instant, milliseconds, seconds
from controlplane.core.memory_ledger import Footprint
from controlplane.core.pool_view import Reserve
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.service.memory.demand_forecast import MemoryDemandForecast


def request(kind=Kind.GENERATE, *, priority=2, tokens=10) -> Request:
    return Request(
        id="r", kind=kind, model="m", tenant="t", service_class=ServiceClass("c", Slo(), priority, False),
        slo=Slo(), arrival=Instant(0), prompt_tokens=tokens, max_output_tokens=1,
    )  # fmt: skip


def trained(demand: MemoryDemandForecast) -> MemoryDemandForecast:
    """Thirty seconds with three high-priority requests of 100 bytes and 500 embedding tokens each."""
    for second in range(30):
        for part in range(3):
            now = Instant(seconds(second) + milliseconds(100 * part))
            demand.observe_arrival(request(), Footprint(100), now)
        demand.observe_arrival(request(Kind.EMBED, tokens=500), Footprint(1), now)
        demand.observe_arrival(request(priority=1), Footprint(7_000), now)
    return demand


def test_forecasts_follow_past_embedding_tokens_and_high_priority_bytes():
    demand = trained(MemoryDemandForecast(seconds(1), 0.9, high_priority=2))
    now = Instant(seconds(30))
    assert demand.embedding_tokens(now) == 500
    assert demand.reserve(now, released_bytes=0) == Reserve(300, 2)
    assert demand.reserve(now, released_bytes=120) == Reserve(180, 2)
    assert demand.reserve(now, released_bytes=900) is None


def test_arrived_bytes_and_past_windows_are_not_reserved():
    demand = trained(MemoryDemandForecast(seconds(1), 0.9, high_priority=2))
    demand.observe_arrival(request(), Footprint(200), Instant(seconds(30.1)))
    assert demand.reserve(Instant(seconds(30.2)), released_bytes=0) == Reserve(100, 2)
    demand.observe_arrival(request(), Footprint(200), Instant(seconds(30.3)))
    assert demand.reserve(Instant(seconds(30.4)), released_bytes=0) is None
    for second in range(31, 100):
        demand.reserve(Instant(seconds(second)), released_bytes=0)
    assert demand.reserve(Instant(seconds(100)), released_bytes=0) is None


def test_nothing_is_reserved_without_a_level_a_priority_or_a_history():
    without_level = trained(MemoryDemandForecast(seconds(1), None, high_priority=2))
    assert without_level.reserve(Instant(seconds(30)), released_bytes=0) is None
    assert without_level.embedding_tokens(Instant(seconds(30))) == 0
    without_priority = trained(MemoryDemandForecast(seconds(1), 0.9, high_priority=None))
    assert without_priority.reserve(Instant(seconds(30)), released_bytes=0) is None
    assert MemoryDemandForecast(seconds(1), 0.9, high_priority=2).embedding_tokens(Instant(seconds(30))) == 0
