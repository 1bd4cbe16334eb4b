"""Frames and payloads survive packing and unpacking."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.embedding.ipc import (
    HEADER,
    Frame,
    FrameKind,
    PassResult,
    pack_inputs,
    unpack_header,
    unpack_inputs,
)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=20), min_size=1, max_size=20))
def test_inputs_round_trip(inputs):
    lengths, ids = unpack_inputs(pack_inputs([np.array(i, dtype=np.uint32) for i in inputs]))
    assert lengths.tolist() == [len(i) for i in inputs]
    assert ids.tolist() == [token for i in inputs for token in i]


def test_results_round_trip():
    rows = np.array([[1.5, -2.0], [0.0, 3e-8]], dtype=np.float32)
    found = PassResult.unpack(PassResult(rows, 5, 7, 9).pack(), 2)
    assert (found.rows == rows).all()
    assert (found.elapsed_ns, found.peak_bytes, found.reserved_bytes) == (5, 7, 9)


def test_header_holds_kind_number_and_size():
    packed = Frame(FrameKind.VECTORS, 2**32 + 7, b"abc").pack()
    assert unpack_header(packed[: HEADER.size]) == (FrameKind.VECTORS, 2**32 + 7, 3)
    assert packed[HEADER.size :] == b"abc"


def test_an_unknown_kind_is_rejected():
    with pytest.raises(ValueError, match="99"):
        unpack_header(HEADER.pack(99, 0, 0))
