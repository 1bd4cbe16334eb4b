"""The requests that are in the system when a block begins."""

import pytest

from benchmark_control_plane.tuning.blocks import _resumed

ROW = {
    "at": 1_000_000,
    "kind": "generate",
    "outcome": "aborted",
    "ttft_ms": 1_000.0,
    "e2e_ms": 5_000.0,
    "output_tokens": 100,
    "forecast": [8, 40, 80, 160, 400],
    "decisions": [{"at_ms": 3.0}],
}


def test_a_client_that_left_does_so_at_the_same_moment_in_a_block_that_begins_later():
    # A second after its first token, of four.
    reading = _resumed(ROW, 3_000_000)
    assert (reading["at"], reading["e2e_ms"], reading["output_tokens"]) == (3_000_000, 3_000.0, 75)
    assert (reading["forecast"], reading["decisions"]) == ([6, 30, 60, 120, 300], ())
    waiting = _resumed(ROW, 1_500_000)
    assert (waiting["at"], waiting["e2e_ms"]) == (1_500_000, pytest.approx(4_500.0))
    assert waiting["output_tokens"] == 100
