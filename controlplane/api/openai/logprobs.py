"""How probable was each token? The two shapes in which OpenAI tells it."""

from collections.abc import Iterable

from controlplane.core.generation import TokenLogprob

# Log probability of what the engine calls impossible; JSON has no infinity.
_FLOOR = -9999.0
_REPLACEMENT = "\ufffd"


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, object]:
    content = [
        _entry(token.token, token.logprob)
        | {"top_logprobs": [_entry(text, logprob) for text, logprob in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> dict[str, object]:
    # A token that ends inside a character has bytes that its text no longer tells.
    known_bytes = None if _REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, _FLOOR), "bytes": known_bytes}


def completion_logprobs(tokens: Iterable[TokenLogprob], *, offset: int) -> dict[str, object]:
    """`offset` is the number of characters before the first of these tokens."""
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
