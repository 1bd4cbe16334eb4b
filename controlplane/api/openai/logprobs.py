"""Log probabilities in OpenAI's two formats: chat and completions."""

from collections.abc import Iterable
from typing import Any

from controlplane.core.generation import TokenLogprob

# Stands for minus infinity, which JSON cannot express.
_FLOOR = -9999.0
_REPLACEMENT = "\ufffd"


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, object]:
    """The `logprobs` object of a chat choice."""
    return {"content": token_logprobs(tokens), "refusal": None}


def token_logprobs(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """One object per token of a chat, with the likeliest tokens of its position."""
    return [
        _entry(token.token, token.logprob)
        | {"top_logprobs": [_entry(text, logprob) for text, logprob in token.top]}
        for token in tokens
    ]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # A token that ends inside a character has a replacement character in its text; its bytes are lost.
    known_bytes = None if _REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, _FLOOR), "bytes": known_bytes}


def completion_logprobs(tokens: Iterable[TokenLogprob], *, offset: int) -> dict[str, object]:
    """The `logprobs` object of a completion choice; `offset` counts the characters before these tokens."""
    tokens = tuple(tokens)
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [max(token.logprob, _FLOOR) for token in tokens],
        "top_logprobs": [
            {token.token: max(token.logprob, _FLOOR)} | {text: max(lp, _FLOOR) for text, lp in token.top}
            for token in tokens
        ],
        "text_offset": offsets,
    }
