"""Log probabilities in OpenAI's two formats: chat and completions.

The alternatives of a token are encoded as soon as it is there: twenty for each token of a long answer are
megabytes of JSON, which would stop the event loop at the answer's end.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

import orjson

from controlplane.core.generation import TokenLogprob

# Stands for minus infinity, which JSON cannot express.
_FLOOR = -9999.0
_REPLACEMENT = "\ufffd"
_UNKNOWN, _EMPTY = b"null", b"[]"


def chat_entries(tokens: Iterable[TokenLogprob]) -> list[orjson.Fragment]:
    """One encoded object per token of a chat, with the likeliest tokens of its position.

    The bytes of a token that ends inside a character are lost: null.
    """
    return [_entry(token, _UNKNOWN) for token in tokens]


def bounded_logprob(token: TokenLogprob) -> float:
    """The log probability of the chosen token, as JSON can express it."""
    return max(token.logprob, _FLOOR)


def response_entries(tokens: Iterable[TokenLogprob]) -> list[orjson.Fragment]:
    """The same for the Responses protocol, whose lists of bytes are never null."""
    return [_entry(token, _EMPTY) for token in tokens]


def _entry(token: TokenLogprob, unknown: bytes) -> orjson.Fragment:
    top = b",".join(_fields(text, logprob, unknown) + b"}" for text, logprob in token.top)
    return orjson.Fragment(b'%b,"top_logprobs":[%b]}' % (_fields(token.token, token.logprob, unknown), top))


def _fields(text: str, logprob: float, unknown: bytes) -> bytes:
    return b'%b,"logprob":%b' % (_text_fields(text, unknown), orjson.dumps(max(logprob, _FLOOR)))


# Answers have few different tokens among their likeliest ones.
@lru_cache(maxsize=8192)
def _text_fields(text: str, unknown: bytes) -> bytes:
    known_bytes = unknown if _REPLACEMENT in text else orjson.dumps(list(text.encode()))
    return b'{"token":%b,"bytes":%b' % (orjson.dumps(text), known_bytes)


class CompletionLogprobs:
    """The `logprobs` object of a completion choice, which grows with its tokens."""

    def __init__(self, *, offset: int = 0, first: str | None = None) -> None:
        """Begins before the first token.

        Args:
            offset: number of characters before the tokens.
            first: text of the first token of an echoed prompt, which precedes them and has no probability.
        """
        opening = [] if first is None else [first]
        self._offset = offset
        self._texts = opening
        self._logprobs: list[float | None] = [None] * len(opening)
        self._top: list[orjson.Fragment | None] = [None] * len(opening)

    def add(self, tokens: Iterable[TokenLogprob]) -> None:
        """Appends the tokens."""
        for token in tokens:
            logprob = bounded_logprob(token)
            likely = {token.token: logprob} | {text: max(lp, _FLOOR) for text, lp in token.top}
            self._texts.append(token.token)
            self._logprobs.append(logprob)
            self._top.append(orjson.Fragment(orjson.dumps(likely)))

    @property
    def end(self) -> int:
        """Number of characters up to the end of the last token."""
        return self._offset + sum(map(len, self._texts))

    def to_json(self) -> dict[str, object]:
        """The object so far."""
        offsets = list(accumulate(map(len, self._texts[:-1]), initial=self._offset)) if self._texts else []
        return {
            "tokens": self._texts,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": offsets,
        }
