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

_MOST = 4_096
_DIGEST_BYTES = 16


@dataclass(slots=True)
class PromptVectorCache:
    """`model` is the embedding model whose vectors are kept; those of others are passed over."""

    model: str
    _kept: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)

    def computed(self, model: str, texts: Sequence[str], vectors: Vectors) -> None:
        if model != self.model:
            return
        for text, vector in zip(texts, vectors, strict=True):
            self._kept[_digest(text)] = vector.astype(np.float16).tobytes()
            self._kept.move_to_end(_digest(text))
        while len(self._kept) > _MOST:
            self._kept.popitem(last=False)

    def beside(self, features: PromptFeatures, text: str) -> PromptFeatures:
        """The features with the vector of its text, if that was embedded."""
        digest = _digest(text)
        vector = self._kept.get(digest)
        if vector is None:
            return features
        self._kept.move_to_end(digest)
        return replace(features, vector=vector)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "replace"), digest_size=_DIGEST_BYTES).digest()
