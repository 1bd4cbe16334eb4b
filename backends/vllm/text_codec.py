"""The `TextCodec` of a Hugging Face tokenizer."""

from collections.abc import Sequence
from typing import Any


class HuggingFaceCodec:
    """Encodes and decodes by a Hugging Face tokenizer, as vLLM's /tokenize and /detokenize do."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = len(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text of any length."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids)))

    def strings(self, token_ids: Sequence[int]) -> list[str]:
        """The tokenizer's own string of each token."""
        return list(self._tokenizer.convert_ids_to_tokens(list(token_ids)))
