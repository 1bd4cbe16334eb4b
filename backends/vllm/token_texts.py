"""Decodes each token of the vocabulary once for log probabilities.

vLLM decodes every alternative of every position anew: half of the server's work for an answer with twenty
alternatives a token.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.engine import logprobs

_FUNCTION = "convert_ids_list_to_tokens"
_Decode = Callable[[Any, list[int]], list[str]]


def remember_token_texts() -> None:
    """Lets vLLM's log probabilities look up the texts of tokens that were decoded before.

    Has no effect on a release that decodes them elsewhere.
    """
    decode = getattr(logprobs, _FUNCTION, None)
    if decode is not None and not isinstance(decode, TokenTexts):
        setattr(logprobs, _FUNCTION, TokenTexts(decode))


class TokenTexts:
    """Replaces vLLM's function that decodes tokens one by one; at most the vocabulary is kept.

    Args:
        decode: vLLM's function, from a tokenizer and token ids to one text per id.
    """

    def __init__(self, decode: _Decode) -> None:
        self._decode = decode
        self._texts: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()

    def __call__(self, tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        if (texts := self._texts.get(tokenizer)) is None:
            texts = self._texts[tokenizer] = {}
        if missing := [token for token in token_ids if token not in texts]:
            texts.update(zip(missing, self._decode(tokenizer, missing), strict=True))
        return [texts[token] for token in token_ids]
