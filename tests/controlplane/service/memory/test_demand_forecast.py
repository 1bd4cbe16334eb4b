"""What is kept for work that has not come yet."""

from controlplane.core.clock import Instant, milliseconds, seconds
from controlplane.core.memory import Footprint
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.core.view import Reserve
from controlplane.service.memory.demand import MemoryDemandForecast


def request(kind=Kind.GENERATE, *, priority=2, tokens=10) -> Request:
    return Request(
        id="r", kind=kind, model="m", tenant="t", service_class=ServiceClass("c", Slo(), priority, False),
        slo=Slo(), arrival=Instant(0), prompt_tokens=tokens, max_output_tokens=1,
    )  # fmt: skip


def taught(foresight: MemoryDemandForecast) -> MemoryDemandForecast:
    """Thirty seconds of three urgent requests of 100 bytes, and of 500 embedding tokens, each."""
    for second in range(30):
        for part in range(3):
            now = Instant(seconds(second) + milliseconds(100 * part))
            foresight.observe_arrival(request(), Footprint(100), now)
        foresight.observe_arrival(request(Kind.EMBED, tokens=500), Footprint(1), now)
        foresight.observe_arrival(request(priority=1), Footprint(7_000), now)
    return foresight


def test_embedding_tokens_and_urgent_bytes_are_expected_as_they_came():
    foresight = taught(MemoryDemandForecast(seconds(1), 0.9, high_priority=2))
    now = Instant(seconds(30))
    assert foresight.embedding_tokens(now) == 500
    assert foresight.reserve(now, released_bytes=0) == Reserve(300, 2)
    assert foresight.reserve(now, released_bytes=120) == Reserve(180, 2)
    assert foresight.reserve(now, released_bytes=900) is None


def test_what_has_come_is_no_longer_kept_and_what_did_not_come_is_let_go():
    foresight = taught(MemoryDemandForecast(seconds(1), 0.9, high_priority=2))
    foresight.observe_arrival(request(), Footprint(200), Instant(seconds(30.1)))
    assert foresight.reserve(Instant(seconds(30.2)), released_bytes=0) == Reserve(100, 2)
    foresight.observe_arrival(request(), Footprint(200), Instant(seconds(30.3)))
    assert foresight.reserve(Instant(seconds(30.4)), released_bytes=0) is None
    for second in range(31, 100):
        foresight.reserve(Instant(seconds(second)), released_bytes=0)
    assert foresight.reserve(Instant(seconds(100)), released_bytes=0) is None


def test_nothing_is_kept_without_a_level_a_class_or_a_past():
    assert (
        taught(MemoryDemandForecast(seconds(1), None, high_priority=2)).reserve(
            Instant(seconds(30)), released_bytes=0
        )
        is None
    )
    assert (
        taught(MemoryDemandForecast(seconds(1), None, high_priority=2)).embedding_tokens(Instant(seconds(30)))
        == 0
    )
    assert (
        taught(MemoryDemandForecast(seconds(1), 0.9, high_priority=None)).reserve(
            Instant(seconds(30)), released_bytes=0
        )
        is None
    )
    assert MemoryDemandForecast(seconds(1), 0.9, high_priority=2).embedding_tokens(Instant(seconds(30))) == 0
