"""A shortened embedding keeps its first direction, and is a unit again if the whole one was."""

import numpy as np

from controlplane.api.openai.embeddings import shortened


def test_rows_are_cut_and_units_are_rescaled():
    found = shortened(np.array([[0.3, 0.4, 0.75**0.5], [0.0, 0.0, 1.0]], dtype=np.float32), 2)
    assert np.allclose(found, [[0.6, 0.8], [0.0, 0.0]])
    assert found.dtype == np.float32


def test_rows_that_were_never_units_are_only_cut():
    assert shortened(np.array([[3.0, 4.0, 12.0]], dtype=np.float32), 2).tolist() == [[3.0, 4.0]]
