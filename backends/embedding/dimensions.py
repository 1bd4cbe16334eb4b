"""What is a shorter embedding? The first numbers of the whole one, scaled to unit length again.

Right only for models trained for it (Matryoshka representation learning, Kusupati et al. 2022).
"""

import numpy as np

from controlplane.core.ports import Vectors


def shortened(vectors: Vectors, dimensions: int) -> Vectors:
    cut = vectors[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    # A row of zeros has no direction to keep.
    unit: Vectors = cut / np.where(lengths > 0, lengths, np.float32(1))
    return unit
