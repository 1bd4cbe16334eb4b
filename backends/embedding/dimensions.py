"""What is a shorter embedding? The first numbers of the whole one, at unit length again if that was.

Right only for models trained for it (Matryoshka representation learning, Kusupati et al. 2022).
"""

import numpy as np

from controlplane.core.ports import Vectors

# Half precision leaves a unit vector so far from unit length at most.
_TOLERANCE = 1e-2


def shortened(vectors: Vectors, dimensions: int) -> Vectors:
    cut = vectors[:, :dimensions]
    is_unit = np.abs(np.linalg.norm(vectors, axis=1, keepdims=True) - 1) <= _TOLERANCE
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    # A row of zeros has no direction to keep.
    scaled: Vectors = cut / np.where(is_unit & (lengths > 0), lengths, np.float32(1))
    return scaled
