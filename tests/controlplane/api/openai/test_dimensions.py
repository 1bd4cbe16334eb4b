"""Truncated embeddings keep their direction; unit vectors stay unit vectors."""

import numpy as np

from controlplane.api.openai.embeddings import shortened


def test_vectors_are_truncated_and_unit_vectors_rescaled():
    found = shortened(np.array([[0.3, 0.4, 0.75**0.5], [0.0, 0.0, 1.0]], dtype=np.float32), 2)
    assert np.allclose(found, [[0.6, 0.8], [0.0, 0.0]])
    assert found.dtype == np.float32


def test_vectors_of_other_length_are_only_truncated():
    assert shortened(np.array([[3.0, 4.0, 12.0]], dtype=np.float32), 2).tolist() == [[3.0, 4.0]]
