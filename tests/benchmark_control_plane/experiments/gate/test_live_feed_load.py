"""The feed's cost under load is measured while the requests are live, and for an answer of full size."""

from benchmark_control_plane.experiments.gate import live_feed_load
from controlplane.service.live_records import MAX_ANSWER_BYTES


def test_a_sample_and_an_answer_are_measured_with_live_requests(monkeypatch):
    monkeypatch.setattr(live_feed_load, "LIVE", 12)
    monkeypatch.setattr(live_feed_load, "_REPEATS", 3)
    found = live_feed_load.with_live_requests()
    assert found["live_requests"] == 12
    assert 0 < found["full_answer_bytes"] <= MAX_ANSWER_BYTES
    for name in ("sample_ms", "full_answer_ms", "answer_of_a_second_ms"):
        assert 0 <= found[name]["median"] <= found[name]["max"]
