"""Tests of the progress display, on a terminal and elsewhere."""

import io

import pytest

from benchmark_control_plane.judge.progress import ProgressDisplay

ENTRY = {
    "attainment": {"overall": 0.875}, "offered_rps": 12.0, "rates": {"reject": 0.1}, "valid": True,
    "why_invalid": None,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "bars"), [(Terminal(), 101), (io.StringIO(), 0)])
def test_bar_is_redrawn_per_percent_and_only_on_a_terminal(stream, bars):
    tick = ProgressDisplay(stream, 2).ticker("tandem")
    for answered in range(1_001):
        tick(answered, 1_000)
    drawn = stream.getvalue().split("\r")[1:]
    assert len(drawn) == bars
    assert not drawn or drawn[50].startswith("[############            ] 0/2 runs; tandem: 500/1000")


def test_invalid_and_unplanned_runs_are_shown():
    stream = io.StringIO()
    progress = ProgressDisplay(stream, 1)
    progress.report_run("first", ENTRY)
    progress.report_run("second", ENTRY | {"valid": False, "why_invalid": "the client lagged"})
    first, second = stream.getvalue().splitlines()
    assert first == "[1/1] first:  87.5% of 12.0/s met their SLO, 10.0% rejected"
    assert second.startswith("[2/2] second:") and second.endswith("INVALID: the client lagged")
