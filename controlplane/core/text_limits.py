"""Refuses a text that cannot fit a model, by its characters, before it is tokenized.

Tokenizing takes about a second and up to 480 MB per million characters, which a token each has in the worst
case; a token covers a bounded number of them.
"""

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from controlplane.core.errors import Refused
from controlplane.core.generation import ChatPrompt

LONG_TEXT_CHARACTERS = 4_000
"""Tokenizing a longer text takes more than about 1 ms, so it does not run on the event loop."""

# English has about 4 characters per token; only unusual text has more than 8.
_PART_CHARACTERS_PER_TOKEN = 8
_MOST_PART_CHARACTERS = 131_072
# Tokens at the end of a part that the rest of the text may merge into fewer.
_CUT_TOKENS = 64
# A text's tokens are estimated from one piece of each of so many sections, and such a share of each.
_SECTIONS = 16
# Tokenizers that normalize a text first make up to 18 characters of one. A Korean syllable becomes three.
_WINDOW_CHARACTERS, _MOST_EXPANSION = 4_096, 4


@dataclass(frozen=True, slots=True)
class TextLimit:
    """The longest text of a model: `max_tokens` tokens of at most `token_characters` characters each."""

    model: str
    max_tokens: int
    token_characters: int

    @property
    def characters(self) -> int:
        """A text of more characters has more than `max_tokens` tokens."""
        return self.max_tokens * self.token_characters

    def least_tokens(self, characters: int) -> int:
        """Lower bound of the tokens of a text."""
        return -(-characters // self.token_characters)

    def check(self, characters: int, *, param: str, where: str = "the prompt") -> None:
        """Raises Refused, naming the field `param`, if no text of so many characters can fit."""
        if characters > self.characters:
            raise self._too_long(f"{where} has {characters:,} characters", param)

    def encode(self, encode: Callable[[str], list[int]], text: str, *, param: str) -> list[int]:
        """Token ids of `text`; of one that seems too long the tokens are first counted in parts.

        What is refused so takes no more memory than a part. Raises Refused.
        """
        self.check(len(text), param=param)
        check_expansion([text], param=param)
        part = min(_MOST_PART_CHARACTERS, _PART_CHARACTERS_PER_TOKEN * self.max_tokens)
        if len(text) > part and _estimated_tokens(encode, text) > self.max_tokens:
            self._check_parts(encode, text, part, param)
        return encode(text)

    def _check_parts(self, encode: Callable[[str], list[int]], text: str, part: int, param: str) -> None:
        least = 0
        for end in range(part, len(text) + part, part):
            least += len(encode(text[end - part : end])) - _CUT_TOKENS
            if least > self.max_tokens:
                raise self._too_long(f"the first {min(end, len(text)):,} characters have more", param)

    def _too_long(self, cause: str, param: str) -> Refused:
        return Refused(
            f"{self.model} accepts at most {self.max_tokens:,} tokens, in text at most {self.characters:,} "
            f"characters; {cause}. Shorten it.",
            param=param,
            code="context_length_exceeded",
        )


def _estimated_tokens(encode: Callable[[str], list[int]], text: str) -> int:
    """Tokens of a text by those of pieces of it.

    A client cannot know their places, because Python's hash of a text has a key of the process.
    """
    section = len(text) // _SECTIONS
    piece = section // _SECTIONS
    starts = [at * section + hash((at, text)) % (section - piece + 1) for at in range(_SECTIONS)]
    return _SECTIONS * sum(len(encode(text[start : start + piece])) for start in starts)


def check_expansion(texts: Iterable[str], *, param: str) -> None:
    """Raises Refused, naming the field `param`, for texts that Unicode's form NFKC makes much longer.

    What a tokenizer takes is counted by the characters before it normalizes them. Looked at are windows of
    about 4,096 consecutive characters of one or more texts; ASCII stays as it is, and other text takes 3 to
    20 ns a character.
    """
    characters = expanded = 0
    for text in texts:
        for begin in range(0, len(text), _WINDOW_CHARACTERS):
            part = text[begin : begin + _WINDOW_CHARACTERS]
            characters += len(part)
            expanded += len(part if part.isascii() else unicodedata.normalize("NFKC", part))
            if characters < _WINDOW_CHARACTERS:
                continue
            if expanded > _MOST_EXPANSION * characters:
                raise Refused(
                    f"{param}: {characters:,} consecutive characters become {expanded:,} by NFKC; at most "
                    f"{_MOST_EXPANSION} for each are served, so send the text normalized",
                    param=param,
                    code="invalid_value",
                )
            characters = expanded = 0


def content_length(prompt: ChatPrompt) -> int:
    """Characters of the messages' contents, which every chat template writes."""
    return sum(_characters(message.get("content")) for message in prompt.messages)


def total_length(prompt: ChatPrompt) -> int:
    """Characters of all that a chat template may write: messages with their tool calls, tools and options.

    A list or object counts as one besides what is in it. Counting ends once the text is long, since a body
    may have 400,000 values.
    """
    found = 0
    left: list[object] = [prompt.messages, prompt.tools, prompt.template_options]
    while left and found <= LONG_TEXT_CHARACTERS:
        value = left.pop()
        if isinstance(value, str):
            found += len(value)
        elif isinstance(value, Mapping):
            found += 1 + sum(map(len, value))
            left += value.values()
        elif isinstance(value, Sequence):
            found += 1
            left += value
        else:
            # An integer may have 4,300 digits.
            found += len(repr(value))
    return found


def _characters(value: object) -> int:
    """Characters of the strings in a message's content."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(len, value)) + sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, Sequence) else 0
