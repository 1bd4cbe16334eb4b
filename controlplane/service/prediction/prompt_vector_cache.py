"""Was this text embedded before? The last vectors of one embedding model, for forecasts of answers to it.

Rule: texts are known by their digest, vectors are kept as float16, and the one used longest ago makes room.
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
    """`model` is the embedding model whose vectors are kept; those of others are passed over."""

    model: str
    _vectors: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)

    def store(self, model: str, texts: Sequence[str], vectors: Vectors) -> None:
        if model != self.model:
            return
        for text, vector in zip(texts, vectors, strict=True):
            self._vectors[_digest(text)] = vector.astype(np.float16).tobytes()
            self._vectors.move_to_end(_digest(text))
        while len(self._vectors) > _MAX_ENTRIES:
            self._vectors.popitem(last=False)

    def with_vector(self, gist: PromptFeatures, text: str) -> PromptFeatures:
        """The gist with the vector of its text, if that was embedded."""
        digest = _digest(text)
        vector = self._vectors.get(digest)
        if vector is None:
            return gist
        self._vectors.move_to_end(digest)
        return replace(gist, vector=vector)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "replace"), digest_size=_DIGEST_BYTES).digest()
