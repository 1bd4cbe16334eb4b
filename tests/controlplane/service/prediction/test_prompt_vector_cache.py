import numpy as np

from controlplane.core.request import PromptFeatures
from controlplane.service.prediction.prompt_vector_cache import PromptVectorCache

FEATURES = PromptFeatures((1.0,), (2,))


def test_a_cached_text_brings_its_vector():
    seen = PromptVectorCache("minilm")
    seen.store("minilm", ["a bee", "a wasp"], np.array([[0.5, 0.25], [1.0, 0.0]], np.float32))
    seen.store("other", ["a fly"], np.array([[1.0]], np.float32))
    assert np.frombuffer(seen.with_vector(FEATURES, "a bee").vector, np.float16).tolist() == [0.5, 0.25]
    assert seen.with_vector(FEATURES, "a fly") is FEATURES


def test_the_least_recently_used_vector_is_dropped():
    seen = PromptVectorCache("minilm")
    one = np.ones((1, 1), np.float32)
    seen.store("minilm", ["old"], one)
    seen.store("minilm", ["older"], one)
    seen.with_vector(FEATURES, "old")
    for number in range(4_095):
        seen.store("minilm", [f"text {number}"], one)
    assert seen.with_vector(FEATURES, "old").vector and not seen.with_vector(FEATURES, "older").vector
