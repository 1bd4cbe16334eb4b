"""Decodes each token of the vocabulary once for log probabilities.

vLLM decodes every alternative of every position anew: half of the server's work for an answer with twenty
alternatives a token. One that ends within a character is decoded up to eight times more, together with the
tokens before it, which may begin the character.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.engine import logprobs

_FUNCTION, _METHOD = "convert_ids_list_to_tokens", "_correct_decoded_token"
_INCOMPLETE = "\ufffd"
_Decode = Callable[[Any, list[int]], list[str]]
_Correct = Callable[[Any, int, list[int]], str]


def remember_token_texts() -> None:
    """Lets vLLM's log probabilities look up the texts of tokens that were decoded before.

    Has no effect on a release that decodes them elsewhere.
    """
    decode = getattr(logprobs, _FUNCTION, None)
    if decode is None or isinstance(decode, TokenTexts):
        return
    setattr(logprobs, _FUNCTION, texts := TokenTexts(decode))
    if (correct := getattr(logprobs.LogprobsProcessor, _METHOD, None)) is not None:
        setattr(logprobs.LogprobsProcessor, _METHOD, _within_characters(correct, texts))


def _within_characters(correct: _Correct, texts: "TokenTexts") -> _Correct:
    """The method of vLLM that completes a token by those before it, called if they end within a character."""

    @wraps(correct)
    def correct_within_character(processor: Any, token_id: int, context: list[int]) -> str:
        if context:
            [before] = texts(processor.tokenizer, context[-1:])
            if before and not before.endswith(_INCOMPLETE):
                # What vLLM returns for a token that no context completes.
                return ""
        return correct(processor, token_id, context)

    return correct_within_character


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
