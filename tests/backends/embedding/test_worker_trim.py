"""A worker returns the memory that its passes leave in the heap."""

import socket
import threading
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from backends.embedding import worker
from backends.embedding.ipc import Frame, FrameKind


def test_the_heap_is_trimmed_after_so_much_time_of_passes():
    """Each of 25 frames takes 0.25 s by the clock that the worker reads before and after it."""
    trims: list[None] = []
    frames = iter([Frame(FrameKind.PING, number, b"") for number in range(25)])
    encoder = SimpleNamespace(set_thread_count=lambda: None, trim=lambda: trims.append(None))
    ours, theirs = socket.socketpair()
    readings = iter(0.25 * number for number in range(50))
    with (
        ours,
        theirs,
        patch("backends.embedding.worker.time.monotonic", readings.__next__),
        pytest.raises(StopIteration),
    ):
        worker._run_lane(encoder, ours, threading.Lock(), SimpleNamespace(get=frames.__next__))
    assert len(trims) == 3
