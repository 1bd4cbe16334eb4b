"""The `TextCodec` of engines without a model: a token is a UTF-8 byte, and there are no special tokens."""

from collections.abc import Sequence


class ByteCodec:
    """Encodes a text as its UTF-8 bytes."""

    vocabulary = 256

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """One token per byte."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 become replacement characters."""
        return bytes(token_ids).decode(errors="replace")

    def strings(self, token_ids: Sequence[int]) -> list[str]:
        """The characters of these code points."""
        return [chr(one) for one in token_ids]
