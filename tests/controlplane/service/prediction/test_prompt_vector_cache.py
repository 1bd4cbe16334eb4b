import numpy as np

from controlplane.core.request import PromptFeatures
from controlplane.service.prediction.prompt_vector_cache import PromptVectorCache

FEATURES = PromptFeatures((1.0,), (2,))


def test_a_text_embedded_before_brings_its_vector():
    seen = PromptVectorCache("minilm")
    seen.computed("minilm", ["a bee", "a wasp"], np.array([[0.5, 0.25], [1.0, 0.0]], np.float32))
    seen.computed("other", ["a fly"], np.array([[1.0]], np.float32))
    assert np.frombuffer(seen.beside(FEATURES, "a bee").vector, np.float16).tolist() == [0.5, 0.25]
    assert seen.beside(FEATURES, "a fly") is FEATURES


def test_the_vector_used_longest_ago_makes_room():
    seen = PromptVectorCache("minilm")
    one = np.ones((1, 1), np.float32)
    seen.computed("minilm", ["old"], one)
    seen.computed("minilm", ["older"], one)
    seen.beside(FEATURES, "old")
    for number in range(4_095):
        seen.computed("minilm", [f"text {number}"], one)
    assert seen.beside(FEATURES, "old").vector and not seen.beside(FEATURES, "older").vector
