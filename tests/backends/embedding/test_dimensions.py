"""A shortened embedding keeps its first direction and is a unit again."""

import numpy as np

from backends.embedding.dimensions import shortened


def test_rows_are_cut_and_rescaled():
    found = shortened(np.array([[3.0, 4.0, 12.0], [0.0, 0.0, 1.0]], dtype=np.float32), 2)
    assert np.allclose(found, [[0.6, 0.8], [0.0, 0.0]])
    assert found.dtype == np.float32
