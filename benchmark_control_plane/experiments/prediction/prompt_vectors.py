"""Adds the embedding backend's prompt vectors (bundled MiniLM) to the samples of `prompt_sets`.

The vectors are cached with the bundled tiny models, since computing them takes minutes on one core.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from backends.bundled_models import MINILM, cache_folder, resolve
from benchmark_control_plane.experiments.prediction.prompt_sets import PromptSample


def with_vectors(samples: Sequence[PromptSample]) -> list[PromptSample]:
    """Samples with their vectors, from the cache or computed once."""
    prompts = sorted({sample.prompt for sample in samples})
    digest = blake2b("\0".join(prompts).encode("utf-8", "replace"), digest_size=8).hexdigest()
    file = cache_folder() / f"prompt-vectors-{digest}.npz"
    if not file.exists():
        _compute(prompts, file)
    with np.load(file) as cached:
        known = dict(zip(prompts, cached["vectors"], strict=True))
    return [replace(s, features=replace(s.features, vector=known[s.prompt].tobytes())) for s in samples]


def without_vectors(samples: Sequence[PromptSample]) -> list[PromptSample]:
    return [replace(s, features=replace(s.features, vector=b"")) for s in samples]


def _compute(prompts: Sequence[str], file: Path) -> None:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(resolve(MINILM), device="cpu")
    vectors = encoder.encode(list(prompts), normalize_embeddings=True, show_progress_bar=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, vectors=np.asarray(vectors, np.float16))
