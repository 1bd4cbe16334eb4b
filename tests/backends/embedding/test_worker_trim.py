"""A worker returns the memory that its passes leave in the heap."""

import socket
import threading
from types import SimpleNamespace

import pytest

from backends.embedding import worker
from backends.embedding.ipc import Frame, FrameKind


def test_the_heap_is_trimmed_after_every_so_many_passes():
    trims: list[None] = []
    ours, theirs = socket.socketpair()
    frames = iter([Frame(FrameKind.PING, number, b"") for number in range(2 * worker._PASSES_PER_TRIM + 1)])
    encoder = SimpleNamespace(set_thread_count=lambda: None, trim=lambda: trims.append(None))
    with ours, theirs, pytest.raises(StopIteration):
        worker._run_lane(encoder, ours, threading.Lock(), SimpleNamespace(get=frames.__next__))
    assert len(trims) == 2
