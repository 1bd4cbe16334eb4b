"""Log probabilities in OpenAI's two formats: chat and completions."""

from collections.abc import Iterable
from itertools import accumulate
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


def bounded_logprob(token: TokenLogprob) -> float:
    """The log probability of the chosen token, as JSON can express it."""
    return max(token.logprob, _FLOOR)


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # A token that ends inside a character has a replacement character in its text; its bytes are lost.
    known_bytes = None if _REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, _FLOOR), "bytes": known_bytes}


def completion_logprobs(
    tokens: Iterable[TokenLogprob], *, offset: int, first: str | None = None
) -> dict[str, object]:
    """The `logprobs` object of a completion choice.

    Args:
        tokens: the tokens of the choice.
        offset: number of characters before these tokens.
        first: text of the first token of an echoed prompt, which precedes `tokens` and has no probability.
    """
    tokens = tuple(tokens)
    opening = () if first is None else (first,)
    texts = [*opening, *(token.token for token in tokens)]
    unknown = [None] * len(opening)
    return {
        "tokens": texts,
        "token_logprobs": [*unknown, *map(bounded_logprob, tokens)],
        "top_logprobs": [
            *unknown,
            *(
                {token.token: bounded_logprob(token)} | {text: max(lp, _FLOOR) for text, lp in token.top}
                for token in tokens
            ),
        ],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
    }
