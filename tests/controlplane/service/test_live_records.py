"""The rings of the live feed: sizes, order, paging and the bound of an answer."""

import json
import tracemalloc

import pytest

from controlplane.core.clock import Instant, seconds
from controlplane.service.live_records import MAX_ANSWER_BYTES, RING_SIZES, LiveRecords


class FixedClock:
    def now(self) -> Instant:
        return Instant(seconds(12.5))


def answer(records: LiveRecords, since: int, **about: object) -> dict:
    body = records.since(since, about)
    assert len(body) <= MAX_ANSWER_BYTES
    return json.loads(body)


def test_the_rings_hold_900_samples_and_2000_events():
    assert RING_SIZES["sample"] == 900
    assert sum(RING_SIZES.values()) - RING_SIZES["sample"] == 2_000


def test_a_record_takes_no_more_memory_than_its_text():
    """orjson's own result keeps the buffer that it was written into, 4 KiB for some hundred bytes."""
    records, fields = LiveRecords(FixedClock()), {"text": "x" * 200}
    tracemalloc.start()
    try:
        for _ in range(900):
            records.add("sample", Instant(0), fields)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 900 * 200 < held < 900 * 500


def test_records_come_in_order_and_only_once():
    records = LiveRecords(FixedClock())
    assert answer(records, 0) == {"next": 0, "more": False, "records": [], "now": 12.5}
    for number, kind in enumerate(("sample", "admission", "fault", "sample"), start=1):
        records.add(kind, Instant(seconds(number)), {"n": number})
    found = answer(records, 0, instance="a")
    assert [(one["seq"], one["at"], one["type"]) for one in found["records"]] == [
        (1, 1.0, "sample"), (2, 2.0, "admission"), (3, 3.0, "fault"), (4, 4.0, "sample"),
    ]  # fmt: skip
    assert (found["next"], found["instance"]) == (4, "a")
    assert [one["n"] for one in answer(records, 3)["records"]] == [4]
    assert answer(records, 4)["records"] == []
    # Numbers of an earlier start of the server.
    assert answer(records, 10**17)["next"] == 4


def test_frequent_admissions_never_displace_a_restart():
    records = LiveRecords(FixedClock())
    records.add("restart", Instant(0), {"model": "chat"})
    for _ in range(10 * RING_SIZES["admission"]):
        records.add("admission", Instant(0), {})
    found = answer(records, 0)["records"]
    assert found[0]["model"] == "chat"
    assert found[1]["seq"] == 2 + 9 * RING_SIZES["admission"]


@pytest.mark.parametrize("size", [0, 10, 1_000, 30_000])
def test_a_reader_pages_through_all_records(size):
    records = LiveRecords(FixedClock())
    for number in range(40):
        records.add("sample", Instant(0), {"n": number, "text": "x" * size})
    seen, since, more, answers = [], 0, True, 0
    while more:
        found = answer(records, since, about={"classes": ["interactive"] * 100})
        seen += [one["n"] for one in found["records"]]
        since, more = found["next"], found["more"]
        answers += 1
    assert seen == [*range(40)]
    assert answers == {0: 1, 10: 1, 1_000: 1, 30_000: 20}[size]


def test_memory_is_flat_once_the_rings_are_full():
    records = LiveRecords(FixedClock())

    def add(rounds: int) -> int:
        for number in range(rounds):
            for kind in RING_SIZES:
                records.add(kind, Instant(seconds(number)), {"text": "x" * 100})
        return sum(len(body) for ring in records._rings.values() for _, body in ring)

    full = add(max(RING_SIZES.values()))
    assert add(10_000) <= 1.05 * full


def test_a_record_that_is_too_large_keeps_its_place():
    records = LiveRecords(FixedClock())
    records.add("config", Instant(0), {"text": "x" * 100_000})
    (found,) = answer(records, 0)["records"]
    assert found == {"seq": 1, "at": 0.0, "type": "config", "left_out_bytes": 100_044}
