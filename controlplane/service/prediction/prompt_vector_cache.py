"""LRU cache of the vectors of one embedding model, for the length forecasts of prompts with the same text.

Keys are digests of the texts; vectors are stored as float16.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from controlplane.core.ports import Vectors
from controlplane.core.request import PromptFeatures

_MAX_ENTRIES = 4_096
_DIGEST_BYTES = 16


@dataclass(slots=True)
class PromptVectorCache:
    """Holds the vectors of `model`; those of other models are ignored."""

    model: str
    _vectors: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)

    def store(self, model: str, texts: Sequence[str], vectors: Vectors) -> None:
        """Adds the vectors of `texts`, shape (texts, dimension), and drops those used longest ago."""
        if model != self.model:
            return
        for text, vector in zip(texts, vectors, strict=True):
            self._vectors[_digest(text)] = vector.astype(np.float16).tobytes()
            self._vectors.move_to_end(_digest(text))
        while len(self._vectors) > _MAX_ENTRIES:
            self._vectors.popitem(last=False)

    def with_vector(self, features: PromptFeatures, text: str) -> PromptFeatures:
        """`features` with the vector of `text`, or unchanged if that was not embedded."""
        digest = _digest(text)
        vector = self._vectors.get(digest)
        if vector is None:
            return features
        self._vectors.move_to_end(digest)
        return replace(features, vector=vector)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "replace"), digest_size=_DIGEST_BYTES).digest()
