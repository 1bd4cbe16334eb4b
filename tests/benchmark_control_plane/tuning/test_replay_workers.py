"""Ctrl-C while the workers of `tandem tune` start: a terminal sends it to them, too."""

import signal
from math import inf

import pytest

from benchmark_control_plane.tuning.evaluation import evaluator
from benchmark_control_plane.tuning.time_budget import TimeBudget
from tests.benchmark_control_plane.tuning.synthetic_blocks import block

pytestmark = pytest.mark.long


def interrupted_block():
    """A block; the worker that loads it gets a signal of the terminal first."""
    signal.raise_signal(signal.SIGINT)
    return block()


class InterruptedBlock:
    """Stands for a block until a worker loads it."""

    def __reduce__(self):
        return interrupted_block, ()


def test_workers_that_start_are_not_ended_by_a_signal_to_the_whole_group(tmp_path):
    # Tests started in the background inherit an ignored SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with evaluator(
            [InterruptedBlock()], tmp_path / "state", fingerprint="f", time=TimeBudget(inf, 2)
        ) as replays:
            found = replays.results([({"classes": {name: {}, "b": {}}}, 0) for name in ("a", "c")])
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(found) == 2 and all("exactly one class is the default" in each.refused for each in found)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
