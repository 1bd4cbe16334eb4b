"""A worker returns the memory that its passes leave in the heap, or in a device's allocator."""

import json
import socket
import threading
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from backends.embedding import worker
from backends.embedding.ipc import Frame, FrameKind, pack_inputs


def replies_of(encoder, frames: list[Frame]) -> bytes:
    """What a lane sends for the frames, after which it ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(StopIteration):
        try:
            worker._run_lane(encoder, ours, threading.Lock(), SimpleNamespace(get=iter(frames).__next__))
        finally:
            sent = theirs.recv(1 << 16)
    return sent


def test_the_heap_is_trimmed_after_so_much_time_of_passes():
    """Each of 25 frames takes 0.25 s by the clock that the worker reads before and after it."""
    trims: list[None] = []
    encoder = SimpleNamespace(
        set_thread_count=lambda: None, trim=lambda: trims.append(None), reserved_bytes=0
    )
    readings = iter(0.25 * number for number in range(50))
    with patch("backends.embedding.worker.time.monotonic", readings.__next__):
        replies_of(encoder, [Frame(FrameKind.PING, number, b"") for number in range(25)])
    assert len(trims) == 3


def test_the_heap_is_trimmed_after_so_many_characters_once_no_text_waits():
    waiting = [Frame(FrameKind.TEXTS, number, json.dumps(["x" * 30_000]).encode()) for number in range(9)]
    # Numbers of texts that wait at each trim.
    trims: list[int] = []
    tokenizer = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[len(text)]))
    encoder = SimpleNamespace(raw_tokenizer=tokenizer, trim=lambda: trims.append(len(waiting)))
    has_waited: list[bool] = []

    def is_empty() -> bool:
        # Another text arrives while the fourth is tokenized.
        has_waited.append(True)
        return len(has_waited) != 1

    ours, theirs = socket.socketpair()
    texts = SimpleNamespace(get=lambda: waiting.pop(0), empty=is_empty)
    with ours, theirs, pytest.raises(IndexError):
        worker._run_tokenizer(encoder, ours, threading.Lock(), texts)
    assert trims == [4, 0]


def test_a_pass_that_ran_out_of_memory_leaves_none_reserved():
    encoder = SimpleNamespace(set_thread_count=lambda: None, is_fatal=lambda error: False, reserved_bytes=8)

    def run_pass(lengths, ids):
        encoder.reserved_bytes = 80
        raise MemoryError("no more")

    def release():
        encoder.reserved_bytes = 8

    encoder.run_pass, encoder.release = run_pass, release
    batch = Frame(FrameKind.BATCH, 1, pack_inputs([np.array([5], np.uint32)]))
    sent = replies_of(encoder, [batch, Frame(FrameKind.PING, 2, b"")])
    failed = Frame(FrameKind.OUT_OF_MEMORY, 1, b"MemoryError: no more").pack()
    assert sent == failed + Frame(FrameKind.PONG, 2, b"8").pack()
